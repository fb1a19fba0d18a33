"""What the evidence can be told: the judges of generated videos."""

from dataclasses import dataclass

from omegaconf import MISSING

from videoqat.config.checks import existing, require


@dataclass
class TrainJudgesConfig:
    """The networks that judge generated videos of moving garments, trained on real clips on the CPU."""

    out: str = MISSING  # a .safetensors file; a .json beside it says how good they are
    photos: str = "embedded"  # or the path of a folder with Fashion-MNIST's idx files
    num_clips: int = 8000  # to train on
    num_test_clips: int = 400  # from other photos, through mp4 files
    size: int = 128  # height and width of the clips
    steps: int = 1000  # of the judge of garments; a quarter of them for that of directions
    batch_size: int = 64
    lr: float = 4e-3
    seed: int = 0

    def validate(self) -> None:
        for key in ("num_clips", "num_test_clips", "steps", "batch_size"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(self.size >= 64 and self.size % 16 == 0, "size", self.size, "a multiple of 16, at least 64")
        require(self.lr > 0, "lr", self.lr, "above 0")
        if self.photos != "embedded":
            existing("photos", self.photos, folder=True)


@dataclass
class JudgeConfig:
    """Do generated videos show what their captions say? Judged by two small networks."""

    videos: str = MISSING  # a folder that generate prompts=FILE wrote, with captions such as "a sneaker moves left"
    judges: str = ""  # what train-judges wrote; empty: those that ship

    def validate(self) -> None:
        existing("videos", self.videos, folder=True)
        if self.judges:
            existing("judges", self.judges)
