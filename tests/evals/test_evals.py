import json
import math
import random
from os.path import commonprefix

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2.config import TrainConfig
from gpt2.data.tokenizer import build
from gpt2.errors import UserError
from gpt2.evals import scoring
from gpt2.evals.core import core
from gpt2.evals.examples import hellaswag, lambada
from gpt2.evals.figures import mean, ratio
from gpt2.evals.perplexity import detokenize, wikitext
from gpt2.evals.run_tasks import RunTasks
from gpt2.evals.scoring import Scorer, continuation, windows
from gpt2.evals.tasks import TASKS, validation_data
from gpt2.model import GPT, GPTConfig
from gpt2.training.validation import validate
from tests import plain
from tests.helpers import WORDS, first_params, write_rows

CFG = GPTConfig(
    vocab_size=257, context_length=128, num_layers=2, num_heads=2, embed_dim=16
)
BYTES = build("byte")


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 8, first_params(CFG))


@pytest.fixture(scope="module")
def scorer(params):
    return Scorer(GPT(CFG), params, jax.devices()[:1])


def run_task(name, scorer, tokenizer, path):
    _, score = TASKS[name]
    return score(scorer, tokenizer, path)


def test_validation_divides_all_sums_once_and_gives_bits_per_byte():
    batches = [(4.0, 1.0), (6.0, 3.0)]  # The mean of means would be 3.
    scores = validate(lambda _, batch: {"loss": batch}, None, {"": (1.0, batches)}, 0.5)
    expected = {"eval/loss": 2.5, "eval/perplexity": math.e**2.5}
    expected |= {"eval/bits_per_byte": 2.5 * 0.5 / math.log(2)}
    assert scores == pytest.approx(expected)
    parts = {"a": (0.75, batches), "b": (0.25, [(8.0, 8.0)])}
    scores = validate(lambda _, batch: {"loss": batch}, None, parts, None)
    assert scores["eval/loss"] == 0.75 * 2.5 + 0.25 * 1.0
    assert scores["eval/loss_a"] == 2.5


@pytest.mark.parametrize("batches", [[], [(0.0, 0.0)] * 2])
def test_a_validation_split_without_targets_is_a_line(batches):
    eval_step = lambda _, batch: {"loss": batch}  # noqa: E731
    with pytest.raises(UserError, match="no token to predict"):
        validate(eval_step, None, {"": (1.0, batches)})


def mixed_requests(num=200, seed=0):
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(num):
        context = rng.integers(0, 257, rng.integers(1, 100))
        tokens = rng.integers(0, 257, rng.integers(1, 20))
        requests.append(continuation(context, tokens, 128))
    return requests


APPLY = jax.jit(GPT(CFG).apply)


def logits_by_hand(params, tokens):
    """[T, V], of one text at a time."""
    row = np.zeros((1, 128), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(APPLY({"params": params}, row))[0, : len(tokens)]


def log_prob_by_hand(params, context, tokens):
    text = [*context, *tokens]
    log_probs = jax.nn.log_softmax(logits_by_hand(params, text[:-1]))
    start = len(context) - 1
    return sum(float(log_probs[start + i, token]) for i, token in enumerate(tokens))


@pytest.mark.parametrize(
    "num_devices", [8, pytest.param(1, marks=pytest.mark.thorough)]
)
def test_batched_scores_equal_scores_one_at_a_time(num_devices, params):
    requests = mixed_requests(num=40)
    # A token that is the likeliest, which random ones hardly are.
    best = int(logits_by_hand(params, [1, 2, 3])[-1].argmax())
    requests.append(continuation([1, 2, 3], [best], 128))
    scores = Scorer(GPT(CFG), params, jax.devices()[:num_devices]).score(requests)
    assert scores[-1].greedy and not all(score.greedy for score in scores)
    for request, score in zip(requests, scores, strict=True):
        logits = logits_by_hand(params, request.tokens)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        at = np.flatnonzero(request.targets >= 0)
        expected = log_probs[at, request.targets[at]]
        assert score.log_prob == pytest.approx(expected.sum(), rel=1e-5)
        assert score.count == len(at)
        assert score.greedy == (logits[at].argmax(-1) == request.targets[at]).all()


def test_200_mixed_lengths_compile_once_per_bucket(params):
    scorer = Scorer(GPT(CFG), params, jax.devices()[:1])
    requests = mixed_requests()
    scorer.score(requests)
    buckets = {scoring.bucket(len(r.tokens), 128) for r in requests}
    assert scorer._score._cache_size() == len(buckets) == 3
    # Neither the number of requests nor that of scored tokens matters.
    for num in (1, 7, 100):
        scorer.score(mixed_requests(num, seed=1))
    scorer.score(windows(np.arange(200), 128, 64))
    assert scorer._score._cache_size() == 3


@pytest.mark.parametrize("stride", [1, 5, 8])
@pytest.mark.parametrize("length", [2, 8, 9, 30])
def test_windows_score_every_token_but_the_first_once(length, stride):
    tokens = np.arange(100, 100 + length)
    requests = windows(tokens, 8, stride)
    scored = np.concatenate([r.targets[r.targets >= 0] for r in requests])
    np.testing.assert_array_equal(scored, tokens[1:])
    for index, request in enumerate(requests):
        start = index * stride
        text = tokens[start : start + len(request.tokens)]
        np.testing.assert_array_equal(request.tokens, text)
        if index:
            first = np.flatnonzero(request.targets >= 0)[0]
            assert first >= 8 - stride


def test_long_contexts_lose_their_beginning_and_nothing_else(params, scorer):
    context = list(range(200))
    tokens = [7, 8, 9]
    (score,) = scorer.score([continuation(context, tokens, 128)])
    expected = log_prob_by_hand(params, context[-126:], tokens)
    assert score.log_prob == pytest.approx(expected, rel=1e-5)
    for wrong in (([], [1]), ([1], []), ([1], [2] * 129)):
        with pytest.raises(UserError, match=r"tokens? of context"):
            continuation(*wrong, 128)


def test_standard_errors_are_those_of_the_sample_mean_and_of_resampling():
    rng = np.random.default_rng(0)
    values = rng.normal(size=50)
    assert mean(values)[1] == pytest.approx(values.std(ddof=1) / math.sqrt(50))
    x = rng.gamma(2.0, size=400)
    y = rng.integers(5, 15, 400)
    x = x * y
    rows = rng.integers(0, 400, (2000, 400))
    resampled = (x[rows].sum(1) / y[rows].sum(1)).std()
    assert ratio(x, y)[1] == pytest.approx(resampled, rel=0.1)
    assert math.isnan(mean([1.0])[1])


def figures_by_metric(figures):
    return {figure.metric: figure for figure in figures}


def test_lambada_scores_the_last_token(params, scorer, tmp_path):
    path = tmp_path / "lambada.jsonl"
    texts = ["the cat sat on the mat", "a dog ran home"]
    write_rows(path, [{"text": text} for text in texts])
    figures = figures_by_metric(lambada(scorer, BYTES, path))
    rows = [BYTES.encode(text).tolist() for text in texts]
    log_probs = [log_prob_by_hand(params, row[:-1], row[-1:]) for row in rows]
    expected = math.exp(-np.mean(log_probs))
    assert figures["perplexity, last token"].value == pytest.approx(expected, rel=1e-4)
    assert figures["accuracy, last token"].num_examples == 2


def test_hellaswag_sums_and_normalises_by_token(params, scorer, tmp_path):
    endings = ["runs away", "x", "eats a very long meal and sleeps", "sits down"]
    contexts = [f"A man {i} walks." for i in range(6)]
    path = tmp_path / "hellaswag.jsonl"
    rows = (
        {"ctx": c, "endings": endings, "label": i % 4} for i, c in enumerate(contexts)
    )
    write_rows(path, rows)
    figures = figures_by_metric(hellaswag(scorer, BYTES, path))
    lengths = np.array([len(ending) + 1 for ending in endings])
    by_sum = []
    by_mean = []
    for i, context in enumerate(contexts):
        start = BYTES.encode(context)
        ids = [BYTES.encode(f" {ending}") for ending in endings]
        sums = np.array([log_prob_by_hand(params, start, tokens) for tokens in ids])
        by_sum.append(np.argmax(sums) == i % 4)
        by_mean.append(np.argmax(sums / lengths) == i % 4)
    assert figures["acc"].value == np.mean(by_sum)
    assert figures["acc_norm, llm.c"].value == np.mean(by_mean)


def test_wikitext_is_scored_by_token_and_by_word(params, scorer, tmp_path):
    text = "A small text , of some words .\n" * 3
    (tmp_path / "text").write_text(text)
    ids = [BYTES.eot, *BYTES.encode(text).tolist()]
    nats = -log_prob_by_hand(params, ids[:1], ids[1:])
    figures = figures_by_metric(wikitext(scorer, BYTES, tmp_path / "text"))
    expected = math.exp(nats / len(text))
    assert figures["perplexity per token"].value == pytest.approx(expected, rel=1e-4)
    plain = detokenize(text)
    ids = [BYTES.eot, *BYTES.encode(plain).tolist()]
    nats = -log_prob_by_hand(params, ids[:1], ids[1:])
    expected = math.exp(nats / len(text.split()))
    assert figures["perplexity per word"].value == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("task", ["enwik8", "text8"])
def test_bits_are_by_bytes_of_text_that_is_not_ascii(task, params, scorer, tmp_path):
    text = "Zwölf Boxkämpfer jagen 漢字 quer über den Deich 😀"
    ids = [BYTES.eot, *BYTES.encode(text).tolist()]
    bits = -log_prob_by_hand(params, ids[:1], ids[1:]) / math.log(2)
    # A part of a larger file, which was cut within characters.
    content = "漢".encode()[1:] + text.encode() + "漢".encode()[:2]
    (tmp_path / task).write_bytes(content)
    (figure,) = run_task(task, scorer, BYTES, tmp_path / task)
    assert figure.value == pytest.approx(bits / len(text.encode()), rel=1e-4)
    assert len(text.encode()) > 1.2 * len(text)


@pytest.mark.parametrize("task", ["enwik8", "text8", "wikitext", "lambada", "core"])
def test_bytes_that_are_not_utf_8_are_refused(task, scorer, tmp_path):
    path = tmp_path / task
    path.write_bytes("Zwölf Boxkämpfer".encode("latin-1"))
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Random baseline")
    with pytest.raises(UserError, match=rf"{task} cannot be read .*can't decode byte"):
        run_task(task, scorer, BYTES, path)


def test_wikitext_is_detokenised():
    text = (
        " = = Title = = \n Over 1 @,@ 000 ( or so ) half @-@ kings , "
        'it said " hi there " . It \'s so'
    )
    assert detokenize(text) == (
        ' == Title ==\nOver 1,000 (or so) half-kings, it said "hi there". It\'s so'
    )


def write_run(folder):
    (folder / "config.json").write_text('{"seed": 0, "data": {"val_fraction": 0.25}}')
    return str(folder)


def test_validation_scores_text_that_the_run_did_not_train_on(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt2.evals.tasks.prepare", lambda data: None)
    run = write_run(tmp_path)
    with pytest.raises(UserError, match="do not record the corpus"):
        validation_data(run, None, "", None)
    (tmp_path / "data.json").touch()  # Every run that was trained has one.
    assert validation_data(run, None, "", None).corpus == "pystdlib"
    # Other fractions select other documents, not fewer of the same ones.
    for fraction in (0.3, 0.001):
        with pytest.raises(UserError, match="the run was trained on"):
            validation_data(run, None, "pystdlib", fraction)
    assert validation_data(run, None, "pystdlib", 0.25).val_fraction == 0.25
    assert validation_data(run, None, "synthetic", 0.1).val_fraction == 0.1


def test_another_corpus_is_divided_and_read_as_the_runs(tmp_path):
    run = write_run(tmp_path)
    BYTES.save(tmp_path / "tokenizer.json")
    for source in ((run, None), (None, run)):
        data = validation_data(*source, "synthetic", None)
        assert data.tokenizer == str(tmp_path / "tokenizer.json")
        assert data.val_fraction == (0.25 if source[0] else 0.005)


# CORE and the tasks of a run

# Kind, few-shot examples, delimiter, chance in percent. The prompts of the first are too long.
CORE = [
    ("multiple_choice", 4, "\nAnswer: ", 25.0),
    ("multiple_choice", 0, " ", 40.3),
    ("schema", 1, " ", 50.0),
    ("language_modeling", 1, "= ", 0.0),
]


def make_example(kind, draw):
    one, two, three = (" ".join(draw.choices(WORDS, k=number)) for number in (1, 2, 3))
    gold = draw.randrange(2)
    if kind == "multiple_choice":
        return dict(query=three, choices=[one, two], gold=gold)
    if kind == "schema":
        return dict(context_options=[one, two], continuation=three, gold=gold)
    return dict(context=f" {three} ", continuation=" x"[gold])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Files of every kind of task, in the format of nanochat's eval bundle."""
    folder = tmp_path_factory.mktemp("bundle")
    rows = ["Eval Task,Random baseline"]
    tasks = []
    (folder / "eval_data").mkdir()
    draw = random.Random(0)
    for number, (kind, shots, delimiter, chance) in enumerate(CORE):
        examples = [make_example(kind, draw) for _ in range(8)]
        write_rows(folder / "eval_data" / f"{number}.jsonl", examples)
        rows.append(f"task_{number},{chance}")
        task = dict(label=f"task_{number}", icl_task_type=kind, num_fewshot=[shots])
        given = {} if delimiter == " " else {"continuation_delimiter": delimiter}
        tasks.append(task | {"dataset_uri": f"{number}.jsonl"} | given)
    # The order differs from that of the tasks; spreadsheets write the byte order mark.
    table = "\ufeff" + "\n".join([rows[0], *reversed(rows[1:])])
    (folder / "eval_meta_data.csv").write_text(table, encoding="utf-8")
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": tasks}))
    return folder


def core_by_hand(params, examples, kind, shots, delimiter):
    """Yields the mean losses of each example's alternatives, and whether it is solved, in numpy."""

    def pairs(e):
        if kind == "multiple_choice":
            return [(e["query"], delimiter + choice) for choice in e["choices"]]
        questions = e["context_options"] if kind == "schema" else [e["context"].strip()]
        return [(question, delimiter + e["continuation"]) for question in questions]

    for index, example in enumerate(examples):
        others = examples[:index] + examples[index + 1 :]
        drawn = random.Random(1234 + index).sample(others, shots)
        before = "".join("".join(pairs(e)[e.get("gold", 0)]) + "\n\n" for e in drawn)
        texts = [before + question + answer for question, answer in pairs(example)]
        order = -1 if kind == "schema" else 1
        losses = []
        shared = len(commonprefix([text[::order] for text in texts]))  # noqa: RUF071
        for text in texts:
            length = shared if kind == "schema" else max(len(text) - shared, 1)
            if kind == "language_modeling":
                # The space of the delimiter is a part of the answer.
                length = len(" " + example["continuation"])
            tokens = np.array([256, *text.encode()][-128:])
            logits = plain.logits(CFG, params, tokens)[-length - 1 : -1]
            right = logits[range(length), tokens[-length:]]
            losses.append((np.log(np.exp(logits).sum(axis=1)) - right).mean())
        is_greedy = (logits.max(axis=1) == right).all()
        solved = np.argmin(losses) == example.get("gold")
        yield losses, solved if "gold" in example else is_greedy


def test_core_equals_a_scorer_by_hand(bundle, params, monkeypatch):
    bias = {"ln_f": params["ln_f"] | {"bias": params["ln_f"]["bias"] + 1.0}}
    # A space becomes the likeliest token.
    table = params["wte"]["embedding"].at[ord(" ")].set(2.0)
    params = params | bias | {"wte": {"embedding": table}}
    scorer = Scorer(GPT(CFG), params, jax.devices()[:1])
    seen = []
    centred = []
    score = scorer.score
    monkeypatch.setattr(
        scorer, "score", lambda *args: seen.append(score(*args)) or seen[-1]
    )
    *figures, total = core(scorer, BYTES, bundle / "core.yaml")
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for number, (*task, chance) in enumerate(CORE):
        lines = (bundle / "eval_data" / f"{number}.jsonl").read_text().splitlines()
        random.Random(1337).shuffle(examples := [json.loads(line) for line in lines])
        losses, solved = zip(*core_by_hand(weights, examples, *task), strict=True)
        found = [-score.log_prob / score.count for score in seen[number]]
        expected = [loss for each in losses for loss in each]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert 0 < figures[number].value == np.mean(solved) < 1
        centred.append((np.mean(solved) - chance / 100) / (1 - chance / 100))
    assert total.value == pytest.approx(np.mean(centred), rel=1e-12)


CHOICE = {"query": "Q:", "choices": ["yes", "no"], "gold": 1}
TASK = {
    "label": "toy",
    "dataset_uri": "toy.jsonl",
    "num_fewshot": [1],
    "icl_task_type": "multiple_choice",
}


def score_toy(folder, second=None, chance="toy,50", tasks=(TASK,)):
    """Scores a bundle of one task, whose second example may be given as a text."""
    first = json.dumps(CHOICE)
    lines = "\n".join([first, second or first, first])
    (folder / "eval_data").mkdir()
    (folder / "eval_data" / "toy.jsonl").write_text(lines)
    (folder / "eval_meta_data.csv").write_text(f"Eval Task,Random baseline\n{chance}")
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": tasks}))
    return core(Scorer(GPT(CFG), None), BYTES, folder / "core.yaml")


def test_a_small_bundle_is_scored(tmp_path):
    assert len(score_toy(tmp_path)) == 2


WRONG_EXAMPLES = """\
{"gold": 2}
{"gold": -1}
{"gold": true}
{"gold": 1.0}
{"gold": null}
{"choices": "no"}
{"choices": ["no", "no"]}
{"choices": ["no", null]}
"""


@pytest.mark.parametrize("change", WRONG_EXAMPLES.splitlines())
def test_a_wrong_example_of_core_is_an_error_that_names_its_line(change, tmp_path):
    example = CHOICE | json.loads(change)
    with pytest.raises(UserError, match=r"toy\.jsonl, line 2 cannot be read"):
        score_toy(tmp_path, second=json.dumps(example))


# Among them a bundle that was cut short for a trial, and delimiters that are not text.
WRONG_TASKS = """\
{"num_fewshot": [10]}
{"num_fewshot": [-1]}
{"num_fewshot": [1.5]}
{"num_fewshot": ["1"]}
{"icl_task_type": "quiz"}
{"icl_task_type": "schema"}
{"dataset_uri": "absent.jsonl"}
{"continuation_delimiter": 5}
{"label": "other"}
"""


@pytest.mark.parametrize("change", WRONG_TASKS.splitlines())
def test_a_wrong_task_of_core_is_an_error_of_one_line(change, tmp_path):
    task = TASK | json.loads(change)
    with pytest.raises(UserError, match=r"(core\.yaml|jsonl.*) cannot be read") as told:
        score_toy(tmp_path, tasks=[task])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("number", [0, 2])
def test_a_task_of_core_is_there_once(number, tmp_path):
    with pytest.raises(UserError, match=r"core\.yaml.*(empty|twice)"):
        score_toy(tmp_path, tasks=[TASK] * number)


# 0.25 is a fraction in place of a percentage, and 100 leaves a model nothing to gain.
@pytest.mark.parametrize("chance", ["half", "0.25", "-50", "nan", "inf", "100"])
def test_a_wrong_chance_of_core_is_an_error(chance, tmp_path):
    with pytest.raises(UserError, match=r"eval_meta_data\.csv cannot be read"):
        score_toy(tmp_path, chance=f"toy,{chance}")


@pytest.mark.parametrize("text", ["icl_tasks: 5", "a: [", "- b"])
def test_a_list_of_tasks_that_cannot_be_read_is_named(text, tmp_path):
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Random baseline")
    (tmp_path / "core.yaml").write_text(text)
    with pytest.raises(UserError, match=r"core\.yaml"):
        core(Scorer(GPT(CFG), None), BYTES, tmp_path / "core.yaml")


@pytest.mark.parametrize("content", ["", "  \n"])
@pytest.mark.parametrize("task", ["wikitext", "lambada", "hellaswag", "core"])
def test_an_empty_file_is_an_error_that_names_it(task, content, scorer, tmp_path):
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Random baseline")
    (tmp_path / task).write_text(content)
    with pytest.raises(UserError, match=rf"{task} cannot be read .*empty"):
        run_task(task, scorer, BYTES, tmp_path / task)


def test_a_figure_that_cannot_be_computed_is_an_error(scorer, tmp_path):
    # Bytes that continue a character, and no character.
    (tmp_path / "text8").write_bytes(b"\x80")
    with pytest.raises(UserError, match=r"text8 cannot be read .*empty"):
        run_task("text8", scorer, BYTES, tmp_path / "text8")
    for values in ([], [1.0, math.nan]):
        with pytest.raises(UserError, match="not a finite number"):
            mean(values)


# The test split of HellaSwag has no labels.
@pytest.mark.parametrize(
    ("task", "example"),
    [
        ("lambada", '{"text": 5}'),
        ("lambada", '{"text": "a'),
        ("hellaswag", '{"ctx": "a", "endings": ["a", null], "label": 0}'),
        ("hellaswag", '{"ctx": "a", "endings": ["d", "e", "f", "g"], "label": ""}'),
        ("hellaswag", '{"ctx": "a", "endings": ["d", "e", "f", "g"], "label": "4"}'),
    ],
)
def test_a_wrong_example_is_refused_by_its_line(task, example, tmp_path):
    path = tmp_path / task
    path.write_text(example)
    with pytest.raises(UserError, match=f"{task}, line 1 cannot be read"):
        run_task(task, Scorer(GPT(CFG), None), BYTES, path)


def run_tasks(spec, mesh):
    return RunTasks(GPT(CFG), TrainConfig(eval_tasks=spec), BYTES, mesh)


def test_a_run_scores_spread_parameters_by_the_same_programs(bundle, params, scorer):
    mesh = jax.make_mesh(
        (2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    split = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
    spread = jax.tree.map(
        lambda x: jax.device_put(x, split) if x.ndim == 2 else x, params
    )
    tasks = run_tasks(f"core:{bundle}", mesh)
    found = tasks.score(spread)
    program = Scorer(GPT(CFG), params, list(mesh.devices.flat))._score
    expected = core(scorer, BYTES, bundle / "core.yaml")
    assert found == pytest.approx({f"eval/core/{f.metric}": f.value for f in expected})
    compiled = program._cache_size()
    assert found != tasks.score(jax.tree.map(jnp.zeros_like, spread))
    assert program._cache_size() == compiled > 0


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("cor:", "task=cor is not one of"),
        ("core:.", "needs the file core.yaml"),
        ("{}", "line 1 cannot"),
    ],
)
def test_tasks_that_cannot_be_scored_end_a_run_before_it_begins(tmp_path, spec, told):
    (tmp_path / "lambada.jsonl").write_text('{"txt": "on the mat"}')
    with pytest.raises(UserError, match=told):
        run_tasks(spec.format(f"lambada:{tmp_path}"), jax.make_mesh((1,), ("data",)))
