"""Continues a text.

python -m gpt2.generate --workdir=DIR --prompt=TEXT
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

from absl import flags

from gpt2 import cli
from gpt2.hf.weights import define_source, load_model
from gpt2.model import GPT
from gpt2.model.sampling import Sampling, generate


def define_flags() -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("prompt", "", "Text to continue.")
    flags.DEFINE_integer(
        "max_new_tokens",
        200,
        "At most this many tokens. Beyond the context, the last ones go on.",
        lower_bound=1,
    )
    flags.DEFINE_float(
        "temperature", 1.0, "Divides the logits; 0: always the likeliest token."
    )
    flags.DEFINE_integer("top_k", 0, "Draw among the k likeliest tokens; 0: among all.")
    flags.DEFINE_float(
        "top_p", 1.0, "Draw among the likeliest tokens of this joint probability."
    )
    flags.DEFINE_integer("num_samples", 1, "How many continuations.", lower_bound=1)
    flags.DEFINE_integer(
        "seed", 0, "Of random numbers.", lower_bound=0, upper_bound=2**32 - 1
    )
    define_source()


def main() -> None:
    """Continues `--prompt` in `--num_samples` ways."""
    args = flags.FLAGS
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    cfg, params, tokenizer = load_model(args.workdir, args.hf, args.checkpoint)
    prompt = tokenizer.encode(args.prompt).tolist()
    start = prompt
    if not prompt and tokenizer.eot is not None:
        start = [tokenizer.eot]  # which is not shown
    samples = generate(
        GPT(cfg),
        params,
        [start] * args.num_samples,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        eot=tokenizer.eot,
        vocab_size=tokenizer.vocab_size,
    )
    for index, tokens in enumerate(samples, start=1):
        if args.num_samples > 1:
            print(f"--- sample {index}")
        # Together, since some tokenizers strip the space that begins a text.
        print(tokenizer.decode([*prompt, *tokens]))


if __name__ == "__main__":
    cli.run(main, define_flags)
