"""The techniques of the package, each in its own file; importing this package registers them, the outermost first."""

from blocktrain.train.technique import TECHNIQUES
from blocktrain.train.techniques import growth, kernels, memory_saving, prefix_cache

TECHNIQUES.update(
    kernels=kernels.KIND,
    memory_saving=memory_saving.KIND,
    growth=growth.KIND,
    prefix_cache=prefix_cache.KIND,
)
