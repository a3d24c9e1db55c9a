"""Networks of published packages that docs/models.md shows, exported as their users export them."""

from __future__ import annotations

REQUIREMENTS = (
    "torchvision", "timm", "segmentation-models-pytorch", "ultralytics", "transformers", "diffusers", "monai",
    # what these import
    "anyio", "certifi", "charset-normalizer", "click", "contourpy", "cycler", "einops", "fonttools", "h11", "hf-xet",
    "httpcore", "httpcore2", "httpx", "httpx2", "huggingface-hub", "idna", "importlib-metadata", "kiwisolver",
    "matplotlib", "opencv-python-headless", "pillow", "polars", "psutil", "pyparsing", "python-dateutil", "pyyaml",
    "regex", "requests", "safetensors", "scipy", "shellingham", "six", "sniffio", "tokenizers", "tqdm", "truststore",
    "typer", "ultralytics-thop", "urllib3", "zipp",
)  # fmt: skip

NETWORKS = {
    "ultralytics": """
        yolov8n yolov8s yolov8n-seg yolov8n-pose yolov8n-obb yolov8n-cls yolov8n-p2 yolov8n-ghost yolov3-tiny yolov5n
        yolov6n yolov9t yolov9s yolov10n yolo11n yolo11s yolo11n-seg yolo12n yolo26n rtdetr-resnet50
    """,
    "segmentation_models_pytorch": """
        Unet-resnet34 Unet-mobilenet_v2 Unet-efficientnet-b0 Unet-densenet121 UnetPlusPlus-resnet18 MAnet-resnet18
        Linknet-resnet18 FPN-resnet34 PSPNet-resnet34 PAN-resnet34 DeepLabV3-resnet34 DeepLabV3Plus-resnet34
        UPerNet-resnet18 Segformer-resnet18 DeepLabV3Plus-mobilenet_v2
    """,
    "torchvision": """
        alexnet vgg11_bn resnet18 resnet50 resnext50_32x4d wide_resnet50_2 squeezenet1_0 squeezenet1_1 densenet121
        googlenet inception_v3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small mnasnet1_0 shufflenet_v2_x1_0
        efficientnet_b0 efficientnet_v2_s regnet_y_400mf regnet_x_400mf convnext_tiny swin_t vit_b_16 maxvit_t
        deeplabv3_resnet50 deeplabv3_mobilenet_v3_large fcn_resnet50 lraspp_mobilenet_v3_large r3d_18 mc3_18
    """,
    "timm": """
        densenet121 dpn68 ghostnet_100 hrnet_w18 dla34 dla60x_c cspresnet50 cspdarknet53 darknet53 ese_vovnet19b_dw
        ese_vovnet39b selecsls42b inception_v4 inception_next_tiny xception41 pnasnet5large mobilenetv3_large_100
        mobilenetv4_conv_small efficientnet_lite0 tf_efficientnetv2_b0 mixnet_s fbnetc_100 rexnet_100 repvgg_a0
        repghostnet_100 convnext_atto convnextv2_atto convmixer_768_32 coat_tiny crossvit_tiny_240 deit_tiny_patch16_224
        swinv2_tiny_window8_256 mobilevit_s efficientformer_l1 efficientvit_b0 edgenext_small fastvit_t8 poolformer_s12
        pvt_v2_b0 levit_128 nfnet_f0 eca_resnet33ts halonet26t botnet26t_256 regnetz_b16 resnetv2_50 res2net50_26w_4s
        resnest14d skresnet18 seresnet50 gernet_s mixer_b16_224 tinynet_e visformer_tiny xcit_nano_12_p16_224 hgnet_tiny
        hgnetv2_b0 repvit_m1 cs3darknet_m lcnet_050 focalnet_tiny_srf starnet_s1 rdnet_tiny resnet50d
        swiftformer_s
    """,
    "monai": """
        UNet UNet3d BasicUNet BasicUNet3d BasicUNetPlusPlus AttentionUnet DynUNet DynUNet3d SegResNet FlexibleUNet UNETR
        SwinUNETR DenseNet121 DenseNet1213d EfficientNetBN HighResNet3d
    """,
    "diffusers": "UNet2DModel UNet2DConditionModel AutoencoderTiny AutoencoderKL-decode AutoencoderKL-encode",
    "transformers": """
        Bert Roberta DistilBert Albert GPT2 OPT MPNet Electra Llama Qwen2 Qwen3 T5 Wav2Vec2 ViT Dinov2 ConvNext
        ResNet Segformer Swin PoolFormer MobileViT RegNet RTDetrV2 DFine
    """,
}
# Exported by torch.export too, whose graphs are other ones.
DYNAMO = ("yolov8n", "Unet-resnet34", "resnet50", "densenet121", "googlenet", "mobilenet_v2", "convnext_tiny", "UNet",
          "Llama", "Bert", "UNet2DModel", "ghostnet_100", "dpn68", "hrnet_w18")  # fmt: skip
OPSET, DYNAMO_OPSET = 17, 20


def wanted() -> list[tuple[str, str, bool]]:
    """(package, network, whether torch.export writes it) in the order of the page."""
    found = []
    for package, names in NETWORKS.items():
        for name in names.split():
            found.append((package, name, False))
            if name in DYNAMO and (package, name) != ("timm", "densenet121"):
                found.append((package, name, True))
    return found
