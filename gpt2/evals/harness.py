"""Any task of lm-evaluation-harness on a run or a Hugging Face directory.

    python -m gpt2.evals.harness --model gpt2_jax --model_args workdir=runs/first --tasks piqa

is the harness' own command with one more model, `gpt2_jax`. It needs pip install -e '.[peers]'.
"""

from gpt2.utils import launch

if __name__ == "__main__":
    launch.prepare_process()

from collections import defaultdict
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gpt2.errors import exit_on_user_error, raise_at_interrupt, refuse
from gpt2.evals.examples import after
from gpt2.evals.scoring import Scorer, continuation
from gpt2.generate import Sampling, stream
from gpt2.hf.weights import load_model

PROMPTS_PER_BATCH = 8
TOKENS_PER_CHUNK = 16  # generated between two checks for a stop sequence


@register_model("gpt2_jax")
class HarnessModel(LM):
    """A model of this project, as lm-evaluation-harness wants it.

    `seed` is that of sampled generation. `batch_size`, `max_batch_size` and `device` are accepted,
    since the harness passes them: gpt2/evals/scoring.py sizes batches, for all devices.
    """

    def __init__(
        self,
        workdir: str | None = None,
        hf: str | None = None,
        checkpoint: str | int = "best",
        seed: int = 0,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ):
        super().__init__()
        self._cfg, self._params, self._tokenizer = load_model(workdir, hf, checkpoint)
        refuse(self._tokenizer.eot is None, "this tokenizer lacks the end-of-text token")
        self._scorer = Scorer(self._cfg, self._params)
        self._seed = seed

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Scores (context, continuation) pairs: log-likelihood in nats, and whether greedy."""
        T = self._cfg.context_length
        pairs = [request.args for request in requests]
        scores = self._scorer.score(
            [after(self._tokenizer, context, text, T) for context, text in pairs]
        )
        return [(score.log_prob, score.greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Scores whole texts, in nats, by the harness' own windows."""
        T = self._cfg.context_length
        parts, owners = [], []
        for index, request in enumerate(requests):
            tokens = self._tokenizer.encode(request.args[0]).tolist()
            for window in get_rolling_token_windows(tokens, self._tokenizer.eot, T, 1):
                context, scored = make_disjoint_window(window)
                parts.append(continuation(context, scored, T))
                owners.append(index)
        results = [0.0] * len(requests)
        for owner, score in zip(owners, self._scorer.score(parts), strict=True):
            results[owner] += score.log_prob
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues contexts up to a stop sequence, which is left out."""
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(request.args[1])].append(index)
        texts = [""] * len(requests)
        for group in groups.values():
            group.sort(key=lambda index: len(requests[index].args[0]))
            for start in range(0, len(group), PROMPTS_PER_BATCH):
                rows = group[start : start + PROMPTS_PER_BATCH]
                contexts = [requests[row].args[0] for row in rows]
                continued = self._generate(contexts, requests[rows[0]].args[1])
                for row, text in zip(rows, continued, strict=True):
                    texts[row] = text
        return texts

    def _generate(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        options = normalize_gen_kwargs(options)
        max_new_tokens, stops = options["max_gen_toks"], [s for s in options["until"] if s]
        longest = self._cfg.context_length - max_new_tokens  # prompt
        what = f"the task generates {max_new_tokens} tokens, as many as the context has or more"
        refuse(longest < 1, what, "Give fewer by --gen_kwargs=max_gen_toks=NUMBER")
        sampling = Sampling(
            options["temperature"], options.get("top_k") or 0, options.get("top_p") or 1.0
        )
        eot = self._tokenizer.eot
        prompts = [self._tokenizer.encode(text).tolist()[-longest:] or [eot] for text in contexts]
        for tokens in stream(
            self._params,
            self._cfg,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=self._seed,
            eot=eot,
            vocab_size=self._tokenizer.vocab_size,
            chunk=TOKENS_PER_CHUNK,
        ):
            texts = [self._tokenizer.decode(row) for row in tokens]
            if all(any(stop in text for stop in stops) for text in texts):
                break
        for stop in stops:
            texts = [text.partition(stop)[0] for text in texts]
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    raise_at_interrupt()
    with exit_on_user_error():
        cli_evaluate()
