"""Lines that fit a terminal of 80 columns, and stay whole through a pipe."""

import shlex

import pytest

from gpt2.utils import terminal

TIME = (
    "time: 4m 53s over all starts; of this one step 76%, validation 9%, start and end 7%, "
    "compile 6%, checkpoint 1%, data wait 0%, profile 0%"
)
COMMAND = [
    *("python", "train.py", "--config=configs/quickstart.py", "--config.parallel.fsdp=4"),
    *("--config.data.corpus=text:my books/*.txt", "--config.parallel.fsdp_gather=step"),
]
LONG = "optim.name=muon,optim.learning_rate=0.02"
VERDICTS = [
    ["arm", "mean", "difference", "95 % interval", "verdict"],
    ["baseline", "4.8165", "", "", ""],
    ["optim.name=lion", "5.8445", "+1.0280", "+1.0193 to +1.0367", "worse"],
    [LONG, "4.8170", "+0.0005", "-0.0082 to +0.0092", "no difference larger than 0.00921"],
]


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(terminal, "columns", lambda: 80)


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_through_a_pipe_lines_stay_whole():
    assert terminal.wrap(TIME) == TIME
    assert terminal.wrap_command(COMMAND) == shlex.join(COMMAND)
    assert len(terminal.align(VERDICTS).splitlines()) == len(VERDICTS)


def test_lines_break_between_words(narrow):
    text = terminal.wrap(f"{TIME}\nshort")
    assert widest(text) <= 80
    assert text.split() == [*TIME.split(), "short"]
    path = f"see {'long/' * 30}"  # which a person copies
    assert terminal.wrap(path).split() == path.split()


def test_a_broken_command_is_still_the_command(narrow):
    text = terminal.wrap_command(COMMAND, indent="     ")
    assert widest(text) <= 80
    assert shlex.split(text.replace("\\\n", "")) == COMMAND


def test_a_table_breaks_its_first_and_last_column_only(narrow):
    text = terminal.align(VERDICTS)
    assert widest(text) <= 80
    assert "+1.0193 to +1.0367" in text and "-0.0082 to +0.0092" in text
    for words in ("optim.name=lion", "optim.name=muon,", "difference", "0.00921"):
        assert words in text
