"""What train.py makes of its options: what they leave out, and what is refused at once."""

from tests.test_train import TINY, metrics_of, run

SHORT = [*TINY, "--config.data.corpus=synthetic", "--config.train.num_steps=2"]


def test_a_share_of_the_validation_split_gives_no_bits_per_byte(tmp_path):
    code, stdout, stderr = run(tmp_path / "run", *SHORT, "--config.train.eval_batches=1")
    assert code == 0, stderr
    (scored,) = [line for line in metrics_of(tmp_path / "run") if "eval/loss" in line]
    assert "eval/perplexity" in scored and "eval/bits_per_byte" not in scored
    assert "validation loss" in stdout and "per byte" not in stdout
