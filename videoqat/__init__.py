"""videoqat: train, prove and serve video diffusion models with 4-bit attention.

`import videoqat` is light; torch is loaded when `videoqat.attention_op` or a submodule that needs it is first used.
"""

__version__ = "0.1.0"
