"""The exceptions a user of meshwise can cause, as one tree.

::

    Exception
     └─ MeshwiseError          every error that meshwise raises on purpose
         ├─ JobError           the job itself cannot be run as it is written
         ├─ LayoutError        the layout is not legal for this job or these devices
         ├─ CaptureError       the model cannot be cut as asked (it may still train under dp)
         ├─ DataError          the data cannot be split, sent or counted
         ├─ LaunchError        ranks could not be started
         ├─ RankError          a rank failed; holds the first failing rank and its own error
         ├─ NonFiniteError     a loss is NaN or infinite; names step, rank, microbatch and samples
         ├─ CheckpointError    a checkpoint is missing, torn or of another job
         ├─ DeadlockError      a program waits for something that never comes
         └─ VerifyError        a comparison could not be made
"""

from __future__ import annotations


class MeshwiseError(Exception):
    """Stand above every error that meshwise raises on purpose."""


class JobError(MeshwiseError):
    """Say that the job cannot be run as it is written."""


class LayoutError(MeshwiseError):
    """Say that a layout is not legal for this job or these devices, and which are."""


class CaptureError(MeshwiseError):
    """Say which module keeps a model from being cut, and what to do instead."""


class DataError(MeshwiseError):
    """Say that data cannot be split, sent or counted."""


class LaunchError(MeshwiseError):
    """Say that ranks could not be started."""


class RankError(MeshwiseError):
    """Say which rank failed first and with what error of its own.

    ``rank`` is the first failing rank; ``details`` its traceback as text.
    """

    def __init__(self, message: str, *, rank: int = -1, details: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details


class NonFiniteError(MeshwiseError):
    """Say which step, rank, microbatch and samples gave a loss that is not finite."""


class CheckpointError(MeshwiseError):
    """Say that a checkpoint is missing, torn or of another job."""


class DeadlockError(MeshwiseError):
    """Say which actions of a program wait for something that never comes."""


class VerifyError(MeshwiseError):
    """Say that a comparison could not be made."""
