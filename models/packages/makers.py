"""Makes a network of a published package: `make(package, name)` -> (module in eval mode, its inputs for one image).

Weights are random. BatchNorms take the statistics of a run of two random images, as training would leave them, so that
every layer's output depends on the image. Imports the packages when called.
"""

from __future__ import annotations

from typing import Any

Made = tuple[Any, tuple[Any, ...]]


def image(size: int, channels: int = 3, columns: int = 0) -> Any:
    """A random image, 1 x channels x size x (columns or size)."""
    import torch

    return torch.randn(1, channels, size, columns or size)


def tokens(count: int) -> Any:
    """Random token numbers, 1 x count."""
    import torch

    return torch.randint(0, 100, (1, count))


def torchvision(name: str) -> Made:
    """A classifier at 224 (Inception v3: 299), a segmentation network at 520 or a video network of 8 frames."""
    import torch
    from torchvision import models

    extra = {"weights_backbone": None} if name in models.list_models(models.segmentation) else {}
    if name in ("googlenet", "inception_v3"):
        extra = {"init_weights": False, "aux_logits": False}
    module = models.get_model(name, weights=None, **extra)
    if name in models.list_models(models.video):
        return module, (torch.randn(1, 3, 8, 112, 112),)
    if "weights_backbone" in extra:
        return _named(module, "out"), (image(520),)
    return module, (image(299 if name == "inception_v3" else 224),)


def timm(name: str) -> Made:
    """A classifier at the size that timm deploys it with, exportable where timm has such a form."""
    import timm as package

    module = package.create_model(name, pretrained=False, exportable=True)
    return module, (image(module.pretrained_cfg["input_size"][-1]),)


def segmentation_models_pytorch(name: str) -> Made:
    """`Unet-resnet34`: a decoder on an encoder, at 512 or near it."""
    import segmentation_models_pytorch as package

    decoder, encoder = name.split("-", 1)
    # These pool to 6x6, which PyTorch exports where it divides the map.
    size = {"PSPNet": 480, "UPerNet": 576}.get(decoder, 512)
    return getattr(package, decoder)(encoder_name=encoder, encoder_weights=None, classes=4), (image(size),)


def ultralytics(name: str) -> Made:
    """A network from its description, in the form that the package's own exporter gives it, at 640."""
    from ultralytics.nn import modules, tasks

    kinds = {"-seg": "SegmentationModel", "-pose": "PoseModel", "-obb": "OBBModel", "-cls": "ClassificationModel"}
    kind = "RTDETRDetectionModel" if name.startswith("rtdetr") else "DetectionModel"
    kind = next((k for mark, k in kinds.items() if name.endswith(mark)), kind)
    module = getattr(tasks, kind)(f"{name}.yaml", verbose=False).eval().fuse(verbose=False)
    for part in module.modules():
        if isinstance(part, modules.C2f):
            part.forward = part.forward_split
        if hasattr(part, "export"):
            part.export, part.format, part.dynamic = True, "onnx", False
    return _first(module), (image(224 if name.endswith("-cls") else 640),)


def monai(name: str) -> Made:
    """A network of two dimensions at 256, with one channel in and two classes out; `...3d`: of three, at 64."""
    import torch
    from monai.networks import nets

    dims = 3 if name.endswith("3d") else 2
    size = 64 if dims == 3 else 256
    kind, both = name.removesuffix("3d"), {"spatial_dims": dims, "in_channels": 1, "out_channels": 2}
    steps: dict[str, Any] = {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2)}
    five: dict[str, Any] = {"kernel_size": [3] * 5, "strides": [1, 2, 2, 2, 2], "upsample_kernel_size": [2] * 4}
    extra: dict[str, dict[str, Any]] = {
        "UNet": steps | {"num_res_units": 2, "norm": "batch"},
        "AttentionUnet": steps,
        "DynUNet": five | {"res_block": True},
        "UNETR": {"img_size": (size,) * dims},
        "SwinUNETR": {"feature_size": 24},
        "FlexibleUNet": {"backbone": "efficientnet-b0"},
        "AutoEncoder": steps,
    }
    if kind == "FlexibleUNet":
        both["in_channels"] = 3
    if kind == "EfficientNetBN":
        module = nets.EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=1, num_classes=2)
    else:
        module = getattr(nets, kind)(**both | extra.get(kind, {}))
    return _first(module), (torch.randn(1, both["in_channels"], *(size,) * dims),)


def diffusers(name: str) -> Made:
    """Diffusion networks of the sizes that their authors published, `UNet2DConditionModel` that of tiny-sd."""
    import diffusers as package
    import torch

    step, hidden = torch.tensor([7]), torch.randn(1, 77, 768)
    if name == "UNet2DModel":  # DDPM on CIFAR-10
        module = package.UNet2DModel(
            sample_size=32, block_out_channels=(128, 256, 256, 256), layers_per_block=2,
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        return _first(module), (image(32), step)
    if name == "UNet2DConditionModel":
        module = package.UNet2DConditionModel(
            sample_size=64, block_out_channels=(320, 640, 1280), layers_per_block=1, cross_attention_dim=768,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            mid_block_type=None, attention_head_dim=8,
        )  # fmt: skip
        return _first(module), (image(32, 4), step, hidden)
    if name == "AutoencoderTiny":
        return _method(package.AutoencoderTiny(), "decode"), (image(64, 4),)
    blocks: dict[str, Any] = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4}
    blocks |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    method = name.removeprefix("AutoencoderKL-")
    return _method(package.AutoencoderKL(**blocks), method), (image(128) if method == "encode" else image(16, 4),)


# Width of the smallest network of that kind that was published.
LANGUAGE: dict[str, dict[str, int]] = {
    "Llama": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "Qwen2": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    "Qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8},
}
# D-FINE-S, whose backbone scales and shifts what each ReLU gives. RT-DETRv2's default is ResNet-50-D.
HGNETV2_B0: dict[str, Any] = {
    "stem_channels": [3, 16, 16], "stage_in_channels": [16, 64, 256, 512], "stage_mid_channels": [16, 32, 64, 128],
    "stage_out_channels": [64, 256, 512, 1024], "hidden_sizes": [64, 256, 512, 1024], "stage_num_blocks": [1, 1, 2, 1],
    "stage_numb_of_layers": [3, 3, 3, 3], "use_learnable_affine_block": True,
    "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
D_FINE_S: dict[str, Any] = {
    "encoder_in_channels": [256, 512, 1024], "hidden_expansion": 0.5, "depth_mult": 0.34, "decoder_layers": 3,
}  # fmt: skip
DETECTORS = ("RTDetrV2", "DFine")
TEXT = ("Bert", "Roberta", "DistilBert", "Albert", "GPT2", "OPT", "MPNet", "Electra", *LANGUAGE)


def transformers(name: str) -> Made:
    """Networks of their default configurations, language models at a published width with two layers."""
    import torch
    import transformers as package

    sizes: dict[str, Any] = LANGUAGE.get(name, {})
    if sizes:  # or the table of words would be most of the file
        sizes = {"vocab_size": 1024, "pad_token_id": 0, **sizes}
    if name == "DFine":
        sizes = {"backbone_config": package.HGNetV2Config(**HGNETV2_B0), **D_FINE_S}
    config = getattr(package, f"{name}Config")(**sizes)
    config._attn_implementation = "eager"
    if hasattr(config, "use_pretrained_backbone"):
        config.use_pretrained_backbone = False
    if name in TEXT:
        config.use_cache = False
        for layers in ("num_hidden_layers", "n_layer", "n_layers"):
            if hasattr(config, layers):
                setattr(config, layers, 2)
        names = ("input_ids", "attention_mask")
        return _first(getattr(package, f"{name}Model")(config), names), (
            tokens(64),
            torch.ones(1, 64, dtype=torch.int64),
        )
    if name == "T5":
        return _first(package.T5EncoderModel(config)), (tokens(64),)
    if name == "Wav2Vec2":
        return _first(package.Wav2Vec2Model(config)), (torch.randn(1, 16000),)
    size = 640 if name in DETECTORS else getattr(config, "image_size", 224)
    return _first(getattr(package, f"{name}Model")(config)), (image(size if isinstance(size, int) else 224),)


MAKERS = {maker.__name__: maker for maker in (
    torchvision, timm, segmentation_models_pytorch, ultralytics, monai, diffusers, transformers,
)}  # fmt: skip


def make(package: str, name: str) -> Made:
    """The module, its inputs, both the same every time."""
    import torch

    torch.manual_seed(0)
    module, inputs = MAKERS[package](name)
    module.eval()
    _settle(module, inputs)
    return module, inputs


def _settle(module: Any, inputs: tuple[Any, ...]) -> None:
    """BatchNorms take the mean and the variance of what two random images give them."""
    import torch

    norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    pairs = [torch.cat([x, torch.randn_like(x) if x.is_floating_point() else x]) for x in inputs]
    try:
        if norms:
            with torch.no_grad():
                module(*pairs)
    except (RuntimeError, ValueError, AssertionError):
        pass  # a module for one image alone: norms that were not reached keep mean 0 and variance 1
    module.eval()


def _wrapper() -> Any:
    import torch

    class Wrapper(torch.nn.Module):
        """A module whose first tensor is the output, under a name or of another method where one is given; inputs go to
        the parameters of the given names."""

        def __init__(self, inner: Any, key: str = "", method: str = "forward", names: tuple[str, ...] = ()) -> None:
            super().__init__()
            self.inner, self.key, self.method, self.names = inner, key, method, names

        def forward(self, *inputs: Any) -> Any:
            call = getattr(self.inner, self.method)
            found = call(**dict(zip(self.names, inputs, strict=True))) if self.names else call(*inputs)
            found = found[self.key] if self.key else found
            while not isinstance(found, torch.Tensor):
                found = found.mean if hasattr(found, "mean") else found[0]
            return found

    return Wrapper


def _named(inner: Any, key: str) -> Any:
    return _wrapper()(inner, key)


def _first(inner: Any, names: tuple[str, ...] = ()) -> Any:
    return _wrapper()(inner, names=names)


def _method(inner: Any, method: str) -> Any:
    return _wrapper()(inner, "", method)
