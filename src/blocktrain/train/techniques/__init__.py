"""The techniques of the package, each in its own file. Importing this package registers them, the outermost first."""

from blocktrain.train.technique import register_technique
from blocktrain.train.techniques import growth, kernels, memory_saving, prefix_cache

register_technique("kernels", kernels.build)
register_technique("memory_saving", memory_saving.build)
register_technique("growth", growth.build)
register_technique("prefix_cache", prefix_cache.build)
