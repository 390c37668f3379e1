"""Training: the program of a run, its state, its steps, its checkpoints and its files."""

from gpt2.training.batches import Batches
from gpt2.training.checkpoint import Checkpointer
from gpt2.training.diagnosis import Diagnosis
from gpt2.training.losses import next_token_loss
from gpt2.training.program import Program
from gpt2.training.state import TrainState
from gpt2.training.validation import validate
