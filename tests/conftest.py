"""What holds for every test: one thread, set before torch is imported (the deadline is in pyproject.toml)."""

import os

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"

import torch  # noqa: E402  (only now, or it would not see the variables)

torch.set_num_threads(1)
