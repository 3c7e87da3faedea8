"""Engines: the computation of the service.

transformers may replace layers of a model by kernels that it downloads from a hub; it reads whether it may when it is
imported. Serving downloads nothing, so this package, which is imported first, says no. Set USE_HUB_KERNELS to allow it.
"""

import os

os.environ.setdefault("USE_HUB_KERNELS", "0")
