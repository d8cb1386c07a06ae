"""Tasks to train on."""

from streamgrad.tasks.base import Task

__all__ = ["Task"]
