"""Evaluations: scores are those of one text at a time, and wrong files are named."""

import itertools
import json
import math
import random
from os.path import commonprefix
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from gpt2.config import TrainConfig
from gpt2.data.tokenizer import CharTokenizer, build
from gpt2.errors import UserError
from gpt2.evals import scoring
from gpt2.evals.core import Example, Task, core
from gpt2.evals.examples import hellaswag, lambada
from gpt2.evals.figures import mean, ratio
from gpt2.evals.perplexity import compression, detokenize, wikitext
from gpt2.evals.run_tasks import RunTasks
from gpt2.evals.scoring import Score, Scorer, continuation, windows
from gpt2.evals.tasks import TASKS, validation_data
from gpt2.model import GPT, GPTConfig
from gpt2.training.validation import validate
from tests.helpers import WORDS, first_params, read_rows, thorough, write_rows

CFG = GPTConfig(
    vocab_size=257, context_length=128, num_layers=2, num_heads=2, embed_dim=16
)
BYTES = build("byte")
LOGITS = jax.jit(GPT(CFG).apply)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 8, first_params(CFG))


@pytest.fixture(scope="module")
def scorer(params):
    return Scorer(GPT(CFG), params, jax.devices()[:1])


def run_task(name, scorer, path):
    _, score = TASKS[name]
    return score(scorer, BYTES, path)


def sums(parameters, batch):
    """Return the batch as the sums of a validation step."""
    return {"loss": batch}


def test_validation_divides_all_sums_once_and_gives_bits_per_byte():
    batches = [(4.0, 1.0), (6.0, 3.0)]  # The mean of means would be 3.
    scores = validate(sums, None, {"": (1.0, batches)}, 0.5)
    expected = {"eval/loss": 2.5, "eval/perplexity": math.e**2.5}
    expected["eval/bits_per_byte"] = 2.5 * 0.5 / math.log(2)
    assert scores == pytest.approx(expected)
    parts = {"a": (0.75, batches), "b": (0.25, [(8.0, 8.0)])}
    scores = validate(sums, None, parts, None)
    assert scores["eval/loss"] == 0.75 * 2.5 + 0.25 * 1.0
    assert scores["eval/loss_a"] == 2.5


@pytest.mark.parametrize("batches", [[], [(0.0, 0.0)] * 2])
def test_a_validation_split_without_targets_is_a_line(batches):
    with pytest.raises(UserError, match="no token to predict"):
        validate(sums, None, {"": (1.0, batches)})


def mixed_requests(num, seed=0):
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(num):
        context = rng.integers(0, 257, rng.integers(1, 100))
        tokens = rng.integers(0, 257, rng.integers(1, 20))
        requests.append(continuation(context, tokens, 128))
    return requests


def log_probs_of(params, tokens):
    """Return the log-probabilities `[T, V]` after each token of one text."""
    row = np.zeros((1, 128), np.int32)
    row[0, : len(tokens)] = tokens
    logits = np.asarray(LOGITS({"params": params}, row))
    return log_softmax(logits[0, : len(tokens)], axis=-1)


def score_by_hand(params, request):
    log_probs = log_probs_of(params, request.tokens)
    positions = np.flatnonzero(request.targets >= 0)
    targets = request.targets[positions]
    total = log_probs[positions, targets].sum()
    is_greedy = (log_probs[positions].argmax(axis=1) == targets).all()
    return Score(pytest.approx(total, rel=1e-5), len(positions), is_greedy)


@pytest.mark.parametrize("num_devices", [8, thorough(1)])
def test_batched_scores_equal_scores_one_at_a_time(num_devices, params):
    requests = mixed_requests(num=40)
    # A token that is the likeliest, which random ones hardly are.
    best = log_probs_of(params, [1, 2, 3])[-1].argmax()
    requests.append(continuation([1, 2, 3], [best], 128))
    scorer = Scorer(GPT(CFG), params, jax.devices()[:num_devices])
    scores = scorer.score(requests)
    assert scores == [score_by_hand(params, request) for request in requests]
    assert [score.greedy for score in scores[-2:]] == [False, True]


def test_nan_is_an_error_and_not_the_likeliest_answer(params):
    bias = params["ln_f"]["bias"] * jnp.nan
    broken = params | {"ln_f": params["ln_f"] | {"bias": bias}}
    scorer = Scorer(GPT(CFG), broken, jax.devices()[:1])
    with pytest.raises(UserError, match="computes NaN for a text"):
        scorer.score(mixed_requests(num=1))


def test_200_mixed_lengths_compile_once_per_bucket(params):
    scorer = Scorer(GPT(CFG), params, jax.devices()[:1])
    requests = mixed_requests(num=200)
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
    scored = []
    for index, request in enumerate(windows(tokens, 8, stride)):
        start = index * stride
        text = tokens[start : start + len(request.tokens)]
        np.testing.assert_array_equal(request.tokens, text)
        targets = request.targets[request.targets >= 0]
        scored += targets.tolist()
        if index:  # the tokens before the first target are its context
            assert len(request.targets) - len(targets) >= 8 - stride
    assert scored == tokens[1:].tolist()


def test_long_contexts_lose_their_beginning_and_nothing_else():
    request = continuation(range(200), [7, 8, 9], 128)
    assert request.tokens.tolist() == [*range(74, 200), 7, 8]
    assert request.targets.tolist() == [-1] * 125 + [7, 8, 9]
    for wrong in (([], [1]), ([1], []), ([1], [2] * 129)):
        with pytest.raises(ValueError, match=r"tokens? of context"):
            continuation(*wrong, 128)


def test_standard_errors_are_those_of_the_sample_mean_and_of_resampling():
    rng = np.random.default_rng(0)
    values = rng.normal(size=50)
    expected = values.std(ddof=1) / math.sqrt(50)
    assert mean(values).stderr == pytest.approx(expected)
    y = rng.integers(5, 15, 400)
    x = y * rng.gamma(2.0, size=400)
    rows = rng.integers(0, 400, (2000, 400))
    resampled = x[rows].sum(axis=1) / y[rows].sum(axis=1)
    assert ratio(x, y).stderr == pytest.approx(resampled.std(), rel=0.1)
    assert math.isnan(mean([1.0]).stderr)


def log_prob(scorer, context, tokens):
    (score,) = scorer.score([continuation(context, tokens, 128)])
    return score.log_prob


def figures_by_metric(figures):
    return {figure.metric: figure for figure in figures}


def test_lambada_scores_the_last_token(scorer, tmp_path):
    path = tmp_path / "lambada.jsonl"
    texts = ["the cat sat on the mat", "a dog ran home"]
    write_rows(path, [{"text": f"{text} \n"} for text in texts])
    figures = figures_by_metric(lambada(scorer, BYTES, path))
    rows = [BYTES.encode(text) for text in texts]
    log_probs = [log_prob(scorer, row[:-1], row[-1:]) for row in rows]
    expected = math.exp(-np.mean(log_probs))
    assert figures["perplexity, last token"].value == pytest.approx(expected, rel=1e-4)
    assert figures["accuracy, last token"].num_examples == 2


def test_hellaswag_sums_and_normalises_by_token(scorer, tmp_path):
    endings = ["runs away", "x", "eats a very long meal and sleeps", "sits down"]
    lengths = [len(ending) + 1 for ending in endings]
    rows = []
    by_sum = []
    by_mean = []
    for number in range(6):
        text = f"A man {number} walks."
        label = number % 4
        rows.append({"ctx": text, "endings": endings, "label": label})
        context = BYTES.encode(text)
        ids = [BYTES.encode(f" {ending}") for ending in endings]
        sums = np.array([log_prob(scorer, context, tokens) for tokens in ids])
        by_sum.append(sums.argmax() == label)
        by_mean.append((sums / lengths).argmax() == label)
    path = tmp_path / "hellaswag.jsonl"
    write_rows(path, rows)
    figures = figures_by_metric(hellaswag(scorer, BYTES, path))
    assert figures["acc"].value == np.mean(by_sum)
    assert figures["acc_norm, llm.c"].value == np.mean(by_mean)


def nats_of(scorer, text):
    """Return the nats of a text after the token that begins it."""
    return -log_prob(scorer, [BYTES.eot], BYTES.encode(text))


def test_wikitext_is_scored_by_token_and_by_word(scorer, tmp_path):
    text = "A small text , of some words .\n" * 3
    (tmp_path / "text").write_text(text)
    figures = figures_by_metric(wikitext(scorer, BYTES, tmp_path / "text"))
    expected = math.exp(nats_of(scorer, text) / len(text))
    assert figures["perplexity per token"].value == pytest.approx(expected, rel=1e-4)
    nats = nats_of(scorer, detokenize(text))
    expected = math.exp(nats / len(text.split()))
    assert figures["perplexity per word"].value == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("task", [wikitext, compression])
def test_a_text_that_the_tokenizer_does_not_preserve_is_not_scored(
    task, scorer, tmp_path
):
    def encode(text):
        return BYTES.encode(text[:-2]), 2

    tokenizer = SimpleNamespace(name="lossy", eot=BYTES.eot, encode_counting=encode)
    path = tmp_path / "text"
    path.write_text("A text.\n")
    with pytest.raises(UserError, match="lossy cannot encode 2 bytes"):
        task(scorer, tokenizer, path)


def test_bits_are_by_bytes_of_text_that_is_not_ascii(scorer, tmp_path):
    text = "Zwölf Boxkämpfer jagen 漢字 quer über den Deich 😀"
    num_bytes = len(text.encode())
    assert num_bytes > 1.2 * len(text)
    # A part of a larger file, which was cut within characters.
    content = "漢".encode()[1:] + text.encode() + "漢".encode()[:2]
    path = tmp_path / "enwik8"
    path.write_bytes(content)
    (figure,) = run_task("enwik8", scorer, path)
    expected = nats_of(scorer, text) / math.log(2) / num_bytes
    assert figure.value == pytest.approx(expected, rel=1e-4)


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
    monkeypatch.setattr("gpt2.evals.tasks.prepare_dataset", lambda *_: None)
    run = write_run(tmp_path)
    with pytest.raises(UserError, match="do not record the corpus"):
        validation_data(run, None, "", None)
    (tmp_path / "data.json").touch()  # Every run that was trained has one.
    data, _ = validation_data(run, None, "", None)
    assert data.corpus == "pystdlib"
    # Other fractions select other documents, not fewer of the same ones.
    for corpus in ("pystdlib", "0.5*pystdlib+0.5*synthetic"):
        for fraction in (0.3, 0.001):
            with pytest.raises(UserError, match="the run was trained on"):
                validation_data(run, None, corpus, fraction)
    for corpus, fraction in (("pystdlib", 0.25), ("synthetic", 0.1)):
        data, _ = validation_data(run, None, corpus, fraction)
        assert data.val_fraction == fraction


def test_another_corpus_is_divided_and_read_as_the_runs(tmp_path):
    folder = write_run(tmp_path)
    BYTES.save(tmp_path / "tokenizer.json")
    of_run, _ = validation_data(folder, None, "synthetic", None)
    of_import, _ = validation_data(None, folder, "synthetic", None)
    for data in (of_run, of_import):
        assert data.tokenizer == str(tmp_path / "tokenizer.json")
    assert of_run.val_fraction == 0.25
    assert of_import.val_fraction == 0.005


def test_repeated_documents_are_left_out_only_where_training_left_them_out(tmp_path):
    options = {"corpus": "pystdlib", "unique": True}
    record = json.dumps({"seed": 0, "data": options})
    (tmp_path / "config.json").write_text(record)
    (tmp_path / "data.json").touch()
    for corpus in ("pystdlib", "0.5*pystdlib+0.5*synthetic", "synthetic"):
        data, _ = validation_data(str(tmp_path), None, corpus, None)
        assert data.unique == ("pystdlib" in corpus)


# CORE and the tasks of a run

# Kind, few-shot examples, delimiter, chance in percent. The prompts of the first are too long.
CORE = [
    ("multiple_choice", 4, "\nAnswer: ", 25.0),
    ("multiple_choice", 0, " ", 40.3),
    ("schema", 1, " ", 50.0),
    ("language_modeling", 1, "= ", 0.0),
]


def make_example(kind, draw):
    one = " ".join(draw.choices(WORDS, k=1))
    two = " ".join(draw.choices(WORDS, k=2))
    three = " ".join(draw.choices(WORDS, k=3))
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
        task["dataset_uri"] = f"{number}.jsonl"
        if delimiter != " ":
            task["continuation_delimiter"] = delimiter
        tasks.append(task)
    # The order differs from that of the tasks; spreadsheets write the byte order mark.
    table = "\ufeff" + "\n".join([rows[0], *reversed(rows[1:])])
    (folder / "eval_meta_data.csv").write_text(table, encoding="utf-8")
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": tasks}))
    return folder


def texts_of(task, example):
    """Return the question with each of its answers."""
    kind, _, delimiter, _ = task
    if kind == "multiple_choice":
        return [example["query"] + delimiter + choice for choice in example["choices"]]
    answer = delimiter + example["continuation"]
    if kind == "schema":
        return [context + answer for context in example["context_options"]]
    return [example["context"].strip() + answer]


def requests_by_hand(task, examples, index):
    """Return a request for each answer of an example."""
    kind, num_shots, _, _ = task
    example = examples[index]
    others = examples[:index] + examples[index + 1 :]
    before = ""
    for shot in random.Random(1234 + index).sample(others, num_shots):
        solution = texts_of(task, shot)[shot.get("gold", 0)]
        before += f"{solution}\n\n"
    texts = [before + text for text in texts_of(task, example)]
    requests = []
    for text in texts:
        if kind == "multiple_choice":
            length = max(len(text) - len(commonprefix(texts)), 1)  # noqa: RUF071
        elif kind == "schema":
            reversed_texts = [text[::-1] for text in texts]
            length = len(commonprefix(reversed_texts))  # noqa: RUF071
        else:  # The space of the delimiter is a part of the answer.
            length = len(" " + example["continuation"])
        tokens = [BYTES.eot, *text.encode()]
        requests.append(continuation(tokens[:-length], tokens[-length:], 127))
    return requests


def is_solved(example, scores):
    if "gold" not in example:
        return scores[0].greedy
    means = [score.log_prob / score.count for score in scores]
    return np.argmax(means) == example["gold"]


def test_core_equals_a_scorer_by_hand(bundle, params, monkeypatch):
    # A space becomes the likeliest token.
    bias = params["ln_f"]["bias"] + 1.0
    table = params["wte"]["embedding"].at[ord(" ")].set(2.0)
    changed = {"ln_f": params["ln_f"] | {"bias": bias}, "wte": {"embedding": table}}
    scorer = Scorer(GPT(CFG), params | changed, jax.devices()[:1])
    score = scorer.score
    seen = []

    def record(requests, label):
        seen.append(requests)
        return score(requests, label)

    monkeypatch.setattr(scorer, "score", record)
    *figures, total = core(scorer, BYTES, bundle / "core.yaml")
    centered = []
    for number, task in enumerate(CORE):
        examples = read_rows(bundle / "eval_data" / f"{number}.jsonl")
        random.Random(1337).shuffle(examples)
        groups = [requests_by_hand(task, examples, i) for i in range(len(examples))]
        chex.assert_trees_all_equal(seen[number], [*itertools.chain(*groups)])
        scores = [score(requests) for requests in groups]
        accuracy = np.mean([*map(is_solved, examples, scores)])
        assert 0 < accuracy < 1
        assert figures[number].value == accuracy
        chance = task[-1] / 100
        centered.append((accuracy - chance) / (1 - chance))
    assert total.value == pytest.approx(np.mean(centered), rel=1e-12)


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
def test_a_wrong_task_of_core_is_an_error(change, tmp_path):
    task = TASK | json.loads(change)
    with pytest.raises(UserError, match=r"(core\.yaml|jsonl.*) cannot be read"):
        score_toy(tmp_path, tasks=[task])


@pytest.mark.parametrize("number", [0, 2])
def test_a_task_of_core_is_there_once(number, tmp_path):
    with pytest.raises(UserError, match=r"core\.yaml.*(empty|twice)"):
        score_toy(tmp_path, tasks=[TASK] * number)


def test_an_error_of_a_library_names_the_line_of_the_example(tmp_path):
    path = tmp_path / "lambada.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "abc"}\n')
    letters = CharTokenizer("ab", has_eot=False)
    unseen = r"lambada\.jsonl, line 2: The vocabulary of the char tokenizer .* 'c'\. Use only"
    scorer = Scorer(GPT(CFG), None)
    with pytest.raises(UserError, match=unseen):
        lambada(scorer, letters, path)
    path.write_text('{"text": "ab"}\n{"text": "b"}\n')
    with pytest.raises(
        UserError, match=r"line 2 cannot be read .the example has 0 tokens"
    ):
        lambada(scorer, BYTES, path)


def test_a_task_of_core_without_a_row_of_the_table_is_an_error(tmp_path):
    with pytest.raises(
        UserError, match=r"eval_meta_data\.csv has no row for the task toy"
    ):
        score_toy(tmp_path, chance="other,50")


def test_an_example_of_core_with_nothing_before_its_answer_is_an_error():
    example = Example(["", "a"], 1)
    task = Task("toy", "language_modeling", 0, 0.0, [example])
    letters = CharTokenizer("a", has_eot=False)
    with pytest.raises(
        UserError, match=r"CORE task toy cannot be read .the example has 0 tokens"
    ):
        task.solved(Scorer(GPT(CFG), None), letters)


# 0.25 is a fraction in place of a percentage, and 100 leaves a model nothing to gain.
@pytest.mark.parametrize("chance", ["half", "0.25", "-50", "nan", "inf", "100"])
def test_a_wrong_chance_of_core_is_an_error(chance, tmp_path):
    with pytest.raises(UserError, match=r"eval_meta_data\.csv cannot be read"):
        score_toy(tmp_path, chance=f"toy,{chance}")


def assert_refused(task, content, folder, reason=""):
    """Check that a task refuses a file, and names it."""
    path = folder / task
    path.write_bytes(content)
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline")
    with pytest.raises(UserError, match=rf"{task}.* cannot be read .*{reason}"):
        run_task(task, Scorer(GPT(CFG), None), path)


@pytest.mark.parametrize("content", [b"", b"  \n"])
@pytest.mark.parametrize("task", ["wikitext", "lambada", "hellaswag", "core"])
def test_an_empty_file_is_an_error_that_names_it(task, content, tmp_path):
    assert_refused(task, content, tmp_path, "empty")


@pytest.mark.parametrize("task", ["text8", "wikitext", "lambada", "core"])
def test_bytes_that_are_not_utf_8_are_refused(task, tmp_path):
    content = "Zwölf Boxkämpfer".encode("latin-1")
    assert_refused(task, content, tmp_path, "can't decode byte")


# The test split of HellaSwag has no labels.
@pytest.mark.parametrize(
    ("task", "content"),
    [
        ("lambada", '{"text": 5}'),
        ("lambada", '{"text": "a'),
        ("hellaswag", '{"ctx": "a", "endings": ["a", null], "label": 0}'),
        ("hellaswag", '{"ctx": "a", "endings": "defg", "label": 0}'),
        ("hellaswag", '{"ctx": "a", "endings": ["d", "e", "f"], "label": 0}'),
        ("hellaswag", '{"ctx": "a", "endings": ["d", "e", "f", "g"], "label": 0.5}'),
        ("hellaswag", '{"ctx": "a", "endings": ["d", "e", "f", "g"], "label": ""}'),
        ("hellaswag", '{"ctx": "a", "endings": ["d", "e", "f", "g"], "label": "4"}'),
        ("core", "icl_tasks: 5"),
        ("core", "a: ["),
        ("core", "- b"),
    ],
)
def test_a_file_of_another_form_is_refused(task, content, tmp_path):
    assert_refused(task, content.encode(), tmp_path)


def test_a_figure_that_cannot_be_computed_is_an_error(tmp_path):
    continuing = b"\x80"  # a byte that continues a character, without a character
    assert_refused("text8", continuing, tmp_path, "empty")
    for values in ([], [1.0, math.nan]):
        with pytest.raises(UserError, match="not a finite number"):
            mean(values)


def run_tasks(spec, mesh):
    return RunTasks(GPT(CFG), TrainConfig(eval_tasks=spec), BYTES, mesh)


def test_a_run_scores_spread_parameters_by_the_same_programs(bundle, params, scorer):
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=automatic)
    columns = jax.NamedSharding(mesh, jax.P(None, "fsdp"))

    def spread(x):
        return jax.device_put(x, columns) if x.ndim == 2 else x

    params = jax.tree.map(spread, params)
    tasks = run_tasks(f"core:{bundle}", mesh)
    found = tasks.score(params)
    figures = core(scorer, BYTES, bundle / "core.yaml")
    expected = {f"eval/core/{figure.metric}": figure.value for figure in figures}
    assert found == pytest.approx(expected)
    program = Scorer(GPT(CFG), None, list(mesh.devices.flat))._score
    num_compiled = program._cache_size()
    assert num_compiled > 0
    assert tasks.score(jax.tree.map(jnp.zeros_like, params)) != found
    assert program._cache_size() == num_compiled


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cor:", "task=cor: is not one of"),
        ("core:.", "needs the file core.yaml"),
        ("validation", "task=validation is not one of wikitext"),
        ("lambada:{}", "line 1 cannot"),
        ("lambada:{},lambada:.", "lambada is listed twice"),
    ],
)
def test_tasks_that_cannot_be_scored_end_a_run_before_it_begins(
    spec, message, tmp_path
):
    (tmp_path / "lambada.jsonl").write_text('{"txt": "on the mat"}')
    with pytest.raises(UserError, match=message):
        run_tasks(spec.format(tmp_path), jax.make_mesh((1,), ("data",)))
