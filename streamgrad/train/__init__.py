"""Training: the loop, checkpoints, metrics and progress."""

from streamgrad.train.loop import TrainState, begin, run, training_step

__all__ = ["TrainState", "begin", "run", "training_step"]
