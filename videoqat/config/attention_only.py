"""Settings of `compare-attention`."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from videoqat.config.checks import check_seeds, existing, model_folder, require
from videoqat.config.groups import GenerationRuntimeConfig, SamplingConfig, model_setting
from videoqat.recipes import get_recipe


@dataclass
class CompareAttentionConfig:
    """What recipes do to attention's output, on the Q, K and V of a model's own denoising in bf16: CosSim, L1 and RMSE, as SageAttention3 gives them.

    FOLDER `out` gets report.json, report.md and report.html.
    """

    model: str = model_setting()  # a diffusers folder, or org/name[@REVISION] on the hub
    recipes: list[str] = field(default_factory=lambda: ["sage3", "attn_qat", "attn_qat_search", "attn_qat_paper", "mxfp4"])  # names or files
    prompts: str = MISSING  # a text file, one prompt a line, # starts a comment
    seeds: list[int] = field(default_factory=lambda: [0])
    steps: list[int] = field(default_factory=list)  # denoising steps, from 0; empty: the first, the middle one and the last
    layers: list[int] = field(default_factory=list)  # transformer blocks, from 0; empty: all
    max_queries: int = 256  # of each head and sample, evenly spread; they meet all keys
    out: str = MISSING
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    runtime: GenerationRuntimeConfig = field(default_factory=GenerationRuntimeConfig)

    def validate(self) -> None:
        model_folder("model", self.model)
        existing("prompts", self.prompts)
        require(len(self.recipes) > 0, "recipes", self.recipes, "one or more names or files of recipes")
        found = [get_recipe(recipe) for recipe in self.recipes]
        for recipe in found:
            require(recipe.is_quantised, "recipes", recipe.name, "recipes that quantise; exact attention is what they are held against")
        names = [recipe.name for recipe in found]
        require(len(set(names)) == len(names), "recipes", names, "recipes with names that differ")
        check_seeds("seeds", self.seeds)
        for key in ("seeds", "steps", "layers"):
            values = getattr(self, key)
            require(len(set(values)) == len(values) and all(value >= 0 for value in values), key, values, "numbers from 0 that differ")
        require(len(self.seeds) > 0, "seeds", self.seeds, "one or more")
        self.sampling.validate()
        self.runtime.validate()
        last = self.sampling.num_inference_steps - 1
        require(all(step <= last for step in self.steps), "steps", self.steps, f"0 to {last}, of sampling.num_inference_steps={last + 1}")
        require(self.max_queries >= 1, "max_queries", self.max_queries, "at least 1")
