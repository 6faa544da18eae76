"""The techniques of the package, each in its own file. Importing this package registers them, the outermost first.

A technique from outside the package lies inside of them, also if it was registered before this package was imported.
"""

from blocktrain.train.technique import TECHNIQUES, register_technique
from blocktrain.train.techniques import growth, kernels, memory_saving, prefix_caching

_from_outside = dict(TECHNIQUES)
TECHNIQUES.clear()
register_technique("kernels", kernels.build)
register_technique("memory_saving", memory_saving.build)
register_technique("growth", growth.build)
register_technique("prefix_cache", prefix_caching.build)
TECHNIQUES.update(_from_outside)
