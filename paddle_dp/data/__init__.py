"""What we read: which samples are whose (`sampler`, pure arithmetic), and how they reach the model (`loader`).

No data set lives here (see `datasets/`), and nothing here knows what a sample means or what a model does with
it. For the arithmetic of layouts go to `mesh/`; for what a batch becomes, to `parallel/`.
"""

from paddle_dp.batch import Batch, Micro
from paddle_dp.data.loader import Loader
from paddle_dp.data.sampler import Sampler

__all__ = ["Batch", "Loader", "Micro", "Sampler"]
