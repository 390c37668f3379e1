"""Reports of a run: metrics, progress on the screen, speed, traces, and plots of the loss."""

from gpt2.telemetry.plots import plot_losses
from gpt2.telemetry.recorder import TraceRecorder
from gpt2.telemetry.reporter import Reporter
from gpt2.telemetry.throughput import StepClock
