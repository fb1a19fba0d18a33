"""The tiny pipeline is a whole and honest one: same bytes each time, loadable offline, able to draw, to reconstruct and to learn."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from transformers import AutoTokenizer

from videoqat.config import ExampleModelConfig
from videoqat.data.moving_garments import caption_of, draw_clip, read_photos
from videoqat.errors import CheckpointError, UserError
from videoqat.models.spec import family_of
from videoqat.models.tiny import build_pipeline, build_tokenizer
from videoqat.models.tiny_vae import ASSET, Principal, crop, decode_unclamped, load_tiny_vae, main, psnr_of, read_clips, save, to_video, train
from videoqat.models.wan import FAMILY

PSNR_FLOOR = 28.0  # dB; the shipped weights reach more (videoqat/models/assets/tiny_vae.md)


def garments(split: str, count: int) -> torch.Tensor:
    """Clips as uint8 (count, 17, 64, 64, 3)."""
    photos, labels = read_photos("embedded", split)
    drawn = [draw_clip(photos, labels, 7 * i, num_frames=17, size=64, seed=9, split=split) for i in range(count)]
    return torch.from_numpy(np.stack(drawn))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_same_configuration_same_bytes(tmp_path: Path) -> None:
    folders = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(hash(name))  # what the process drew before must not matter
        report = build_pipeline(ExampleModelConfig(out=str(tmp_path / name), num_layers=1, two_transformers=True, seed=seed))
        folders[name] = files_of(tmp_path / name)
    assert report["components"] == ["transformer", "transformer_2"]
    assert report["tokens_per_clip"] == 320
    assert folders["a"] == folders["b"]
    differing = {key for key in folders["a"] if folders["a"][key] != folders["c"][key]}
    assert differing == {f"{part}/diffusion_pytorch_model.safetensors" for part in ("transformer", "transformer_2")} | {
        "text_encoder/model.safetensors"
    }
    name = "diffusion_pytorch_model.safetensors"
    assert folders["a"][f"transformer/{name}"] != folders["a"][f"transformer_2/{name}"]


def test_building_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    build_pipeline(ExampleModelConfig(out=str(tmp_path / "x"), num_layers=1))
    assert torch.equal(before, torch.get_rng_state())


def test_nothing_is_overwritten(tiny_pipeline: Path) -> None:
    before = files_of(tiny_pipeline)
    with pytest.raises(UserError, match="exists already"):
        build_pipeline(ExampleModelConfig(out=str(tiny_pipeline)))
    assert files_of(tiny_pipeline) == before


def test_shape_follows_the_configuration(tmp_path: Path) -> None:
    build_pipeline(ExampleModelConfig(out=str(tmp_path / "x"), num_layers=3, num_heads=1, head_dim=32))
    geometry = family_of(tmp_path / "x").geometry(tmp_path / "x")
    assert (geometry.num_layers, geometry.num_heads, geometry.head_dim) == (3, 1, 32)


def test_tokenizer_loads_offline_and_knows_the_captions(tiny_pipeline: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_pipeline / "tokenizer", local_files_only=True)
    assert tokenizer.is_fast
    captions = [caption_of(i) for i in range(40)]
    ids = [tokenizer(caption).input_ids for caption in captions]
    assert ids == [build_tokenizer()(caption).input_ids for caption in captions]
    assert len({tuple(x) for x in ids}) == 40
    assert max(map(len, ids)) <= 8, "the captions' words should be single tokens"
    other = "Ein Schloß, 3 Möwen & 水"
    assert tokenizer.decode(tokenizer(other).input_ids, skip_special_tokens=True).strip() == other
    padded = tokenizer(["a bag moves up"], padding="max_length", max_length=12, truncation=True)
    assert padded.attention_mask[0] == sorted(padded.attention_mask[0], reverse=True)
    assert padded.input_ids[0][sum(padded.attention_mask[0]) - 1] == tokenizer.eos_token_id


def test_stock_pipeline_generates_and_heeds_prompt_and_seed(tiny_pipeline: Path) -> None:
    pipeline = WanPipeline.from_pretrained(tiny_pipeline, local_files_only=True)

    def generate(prompt: str, seed: int) -> np.ndarray:
        return pipeline(
            prompt, height=64, width=64, num_frames=17, num_inference_steps=3, guidance_scale=3.0, generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).frames[0]  # fmt: skip

    video = generate("a sneaker moves left", 0)
    assert video.shape == (17, 64, 64, 3)
    assert np.isfinite(video).all()
    assert np.array_equal(video, generate("a sneaker moves left", 0))
    assert not np.array_equal(video, generate("trousers move down", 0))
    assert not np.array_equal(video, generate("a sneaker moves left", 1))


def test_transformer_learns(tiny_pipeline: Path) -> None:
    """Flow matching on one batch: after 12 steps the loss has come down by a third."""
    encoders = FAMILY.load_encoders(tiny_pipeline, device="cpu", dtype=torch.float32)
    latents = FAMILY.encode_video(encoders, to_video(garments("train", 2)))
    condition = FAMILY.batch_conditions(FAMILY.encode_prompts(encoders, [caption_of(0), caption_of(7)], 16), 16)
    model = FAMILY.load_transformer(tiny_pipeline, "transformer", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    t_B = torch.tensor([0.4, 0.8])
    t = t_B.view(-1, 1, 1, 1, 1)
    losses = []
    for _ in range(12):
        loss = (FAMILY.forward(model, (1 - t) * latents + t * noise, t_B, condition) - (noise - latents)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 2 / 3


def test_vae_reconstructs_garments_it_has_not_seen() -> None:
    vae = load_tiny_vae()
    clips = garments("held_out", 6)
    assert psnr_of(vae, clips) > PSNR_FLOOR
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(0.5)  # a VAE that is broken must not pass
    assert psnr_of(vae, clips) < PSNR_FLOOR


def test_latents_are_normal(tiny_pipeline: Path) -> None:
    encoders = FAMILY.load_encoders(tiny_pipeline, device="cpu", dtype=torch.float32)
    latents = FAMILY.encode_video(encoders, to_video(garments("train", 12)))
    assert latents.mean(dim=(0, 2, 3, 4)).abs().max() < 0.5
    deviations = latents.std(dim=(0, 2, 3, 4))
    assert deviations.min() > 0.6
    assert deviations.max() < 1.6


def test_vae_file_that_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "vae.safetensors"
    path.write_bytes(ASSET.read_bytes()[:100_000])
    with pytest.raises(CheckpointError, match="is not the tiny VAE"):
        load_tiny_vae(path)


def test_clips_for_the_vae(tmp_path: Path) -> None:
    clips = garments("train", 2).numpy()
    np.save(tmp_path / "clips.npy", clips)
    assert np.array_equal(read_clips(str(tmp_path / "clips.npy")), clips)
    np.save(tmp_path / "short.npy", clips[:, :16])
    for path, why in ((tmp_path / "short.npy", r"4n\+1"), (tmp_path / "nowhere", "neither a .npy file nor a folder")):
        with pytest.raises(UserError, match=why):
            read_clips(str(path))


def test_vae_is_trained_through_the_decoder_that_serves() -> None:
    vae = load_tiny_vae()
    with torch.no_grad():
        latents = vae.encode(to_video(garments("train", 1))).latent_dist.mode()
        assert torch.equal(decode_unclamped(vae, latents).clamp(-1, 1), vae.decode(latents).sample)


def test_principal_components_are_a_code() -> None:
    clips = garments("train", 6)
    principal = Principal(clips)
    torch.testing.assert_close(principal.synthesis @ principal.analysis, torch.eye(16), atol=1e-3, rtol=0)
    video = to_video(clips[:1])
    latents = principal.latents(video)
    assert latents.shape == (1, 16, 5, 8, 8)
    # One block by hand: frames 5 to 8 (latent 2), rows 8 to 15, columns 24 to 31.
    block = video[0, :, 5:9, 8:16, 24:32].flatten()
    torch.testing.assert_close(latents[0, :, 2, 1, 3], (block - principal.mean) @ principal.analysis, atol=1e-4, rtol=1e-4)
    first = video[0, :, :1, 8:16, 24:32].expand(-1, 4, -1, -1).flatten()
    torch.testing.assert_close(latents[0, :, 0, 1, 3], (first - principal.mean) @ principal.analysis, atol=1e-4, rtol=1e-4)


def test_vae_training_goes_on_from_weights_and_saves_what_loads(tmp_path: Path) -> None:
    clips = garments("train", 4)
    vae = load_tiny_vae()
    before = {key: value.clone() for key, value in vae.state_dict().items()}
    steps = train(vae, clips, steps=2, minutes=5, batch_size=2, num_frames=5, size=16, lr=1e-3, apart=0.5, seed=0)
    assert steps == 2
    moved = [key for key, value in vae.state_dict().items() if not torch.equal(value, before[key])]
    assert {"encoder.conv_in.weight", "encoder.mid_block.resnets.0.conv1.weight", "decoder.conv_out.weight"} <= set(moved)
    save(vae.eval(), clips, tmp_path / "vae.safetensors")
    again = load_tiny_vae(tmp_path / "vae.safetensors")
    for key, value in again.state_dict().items():
        torch.testing.assert_close(value, vae.state_dict()[key], atol=1e-3, rtol=1e-3)
    with torch.no_grad():
        latents = vae.encode(to_video(clips)).latent_dist.mode()
    torch.testing.assert_close(torch.tensor(again.config.latents_mean), latents.mean(dim=(0, 2, 3, 4)), atol=1e-3, rtol=1e-3)


def test_shipped_weights_can_be_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clips = garments("held_out", 3)
    np.save(tmp_path / "clips.npy", clips.numpy())
    words = ["tiny_vae", f"--clips={tmp_path / 'clips.npy'}", f"--held-out={tmp_path / 'clips.npy'}", f"--out={tmp_path / 'out'}", "--steps=0"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        main()  # nothing to measure
    monkeypatch.setattr("sys.argv", [*words, f"--start={ASSET}"])
    main()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny_vae.json"]
    report = json.loads((tmp_path / "out" / "tiny_vae.json").read_text())
    assert report["sha256"] == hashlib.sha256(ASSET.read_bytes()).hexdigest()
    assert (report["steps"], report["psnr_held_out_db"]) == (0, pytest.approx(psnr_of(load_tiny_vae(), clips)))


def test_crops_cut_the_same_place_of_each_clip() -> None:
    clips = torch.arange(2 * 5 * 8 * 8 * 3).reshape(2, 5, 8, 8, 3)
    piece = crop(clips, 1, 4, torch.Generator().manual_seed(0))
    assert piece.shape == (2, 1, 4, 4, 3)
    assert torch.equal(piece[1] - piece[0], torch.full_like(piece[0], 5 * 8 * 8 * 3))
