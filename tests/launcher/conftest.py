"""What the launcher's tests in one process share."""

from tests.launcher.one_rank import alone

__all__ = ["alone"]
