"""Print continuations of a text.

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
    """Define `--prompt`, the flags that control sampling, and the flags that choose the model."""
    flags.DEFINE_string("prompt", "", "Text to continue.")
    flags.DEFINE_integer(
        "max_new_tokens",
        200,
        "Largest number of new tokens. If the text is longer than the model's context, the model "
        "reads only the last tokens of the text.",
        lower_bound=1,
    )
    flags.DEFINE_float(
        "temperature",
        1.0,
        "Number that divides the logits; 0: always choose the most likely token.",
    )
    flags.DEFINE_integer(
        "top_k", 0, "Sample from the k most likely tokens; 0: from all tokens."
    )
    flags.DEFINE_float(
        "top_p",
        1.0,
        "Sample from the smallest set of most likely tokens whose probabilities sum to at least "
        "this number; 1: from all tokens.",
    )
    flags.DEFINE_integer("num_samples", 1, "Number of continuations.", lower_bound=1)
    flags.DEFINE_integer(
        "seed", 0, "Seed of the random numbers.", lower_bound=0, upper_bound=2**32 - 1
    )
    define_source()


def main() -> None:
    """Sample `--num_samples` continuations of `--prompt`, and print each after the prompt."""
    args = flags.FLAGS
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    cfg, params, tokenizer = load_model(args.workdir, args.hf, args.checkpoint)
    # In a locale without UTF-8, Python reads each byte of a non-ASCII character as an unpaired
    # surrogate.
    text = args.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    prompt = tokenizer.encode(text).tolist()
    start = prompt
    if not prompt and tokenizer.eot is not None:
        # A model needs at least one token. The end-of-text token is not printed.
        start = [tokenizer.eot]
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
        # The prompt and the sample are decoded together, because some tokenizers strip the space at
        # the beginning of a text.
        print(tokenizer.decode([*prompt, *tokens]))


if __name__ == "__main__":
    cli.run(main, define_flags)
