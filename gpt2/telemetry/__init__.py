"""What a run tells about itself: metrics, progress, speed, compilations and curves."""

from gpt2.telemetry.plots import plot_losses
from gpt2.telemetry.reporter import Reporter
from gpt2.telemetry.throughput import StepClock
