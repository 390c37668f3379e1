"""Continues a text: `python -m gpt2.generate --workdir=DIR --prompt=TEXT`."""

from collections.abc import Iterator

from absl import flags

from gpt2 import cli
from gpt2.config import MAX_SEED
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import UserError
from gpt2.sampling import Sampling, stream
from gpt2.weights import load_model


def _print_stream(tokenizer: Tokenizer, prompt: str, chunks: Iterator[list[list[int]]]) -> None:
    """Prints one sequence as it grows, up to characters whose bytes are still coming."""
    tokens, shown = [], ""
    for (new,) in chunks:
        tokens += new
        text = prompt + tokenizer.decode(tokens).rstrip("\ufffd")
        print(text[len(shown) :], end="", flush=True)
        shown = text
    print()


def main() -> None:
    """Continues `--prompt` in `--num_samples` ways."""
    args = flags.FLAGS
    if args.temperature == 0.0:
        for name in ("top_k", "top_p", "seed"):
            cli.refuse_ignored(name, "--temperature=0 always takes the likeliest token")
    if args.hf:
        cli.refuse_ignored("checkpoint", "--hf holds a single one")
    cfg, params, tokenizer = load_model(args.workdir, args.hf, args.checkpoint)
    prompt = tokenizer.encode(args.prompt).tolist()
    if not prompt:
        if tokenizer.eot is None:
            raise UserError("--prompt is empty", "Give the text to continue, as --prompt=TEXT")
        prompt = [tokenizer.eot]
    chunks = stream(
        params,
        cfg,
        [prompt] * args.num_samples,
        max_new_tokens=args.max_new_tokens or min(200, max(1, cfg.context_length - len(prompt))),
        sampling=Sampling(args.temperature, args.top_k, args.top_p),
        seed=args.seed,
        eot=tokenizer.eot,
        vocab_size=tokenizer.vocab_size,
        chunk=8 if args.num_samples == 1 else 0,
    )
    if args.num_samples == 1:
        _print_stream(tokenizer, args.prompt, chunks)
        return
    for index, tokens in enumerate(next(chunks)):
        print(f"--- sample {index + 1}\n{args.prompt}{tokenizer.decode(tokens)}")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Directory of a run.")
    flags.DEFINE_string("hf", None, "Directory of a Hugging Face GPT-2, in place of --workdir.")
    flags.DEFINE_string("checkpoint", "best", "best, latest or a step of the run.")
    flags.DEFINE_string("prompt", "", "Text to continue.")
    flags.DEFINE_integer(
        "max_new_tokens", 0, "At most so many tokens; 0: 200, or what fits.", lower_bound=0
    )
    flags.DEFINE_float("temperature", 1.0, "Divides the logits; 0: always the likeliest token.")
    flags.DEFINE_integer("top_k", 0, "Draw among the k likeliest tokens; 0: among all.")
    flags.DEFINE_float("top_p", 1.0, "Draw among the likeliest tokens of this joint probability.")
    flags.DEFINE_integer("num_samples", 1, "How many continuations.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the random numbers.", lower_bound=0, upper_bound=MAX_SEED)
    cli.run(main)
