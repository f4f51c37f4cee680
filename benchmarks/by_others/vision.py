"""Images: classification, segmentation, restoration, contrast with text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from by_others.case import CLASSES, ROWS, VOCAB, Case, classified, images, squared

VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SWIN = {"patch_size": 2, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4), "window_size": 4}
# What each model of timm is told beside its number of classes; every one gets 32 x 32 pixels unless `size` says more.
TIMM: dict[str, dict[str, Any]] = {
    "resnet18": {"channels": (8, 16, 24, 32)},
    "resnetv2_50": {"layers": (1, 1, 1, 1), "channels": (16, 32, 48, 64), "stem_chs": 8},
    "efficientnet_lite0": {},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "repvgg_a0": {},
    "nf_regnet_b0": {},
    "vit_tiny_patch16_224": {"img_size": 32, **VIT},
    "deit3_small_patch16_224": {"img_size": 32, **VIT},
    "beit_base_patch16_224": {"img_size": 32, **VIT},
    "eva02_tiny_patch14_224": {"img_size": 32, **VIT},
    "swin_tiny_patch4_window7_224": {"img_size": 32, **SWIN},
    "swinv2_tiny_window8_256": {"img_size": 32, **SWIN},
    "cait_xxs24_224": {"img_size": 32, **VIT},
    "pvt_v2_b0": {},
    "edgenext_xx_small": {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48), "size": 64},
    "mobilevit_xxs": {"size": 64},
    "crossvit_tiny_240": {"size": 240},
    "coat_tiny": {"img_size": 32, "embed_dims": (32, 32, 32, 32), "serial_depths": (1, 1, 1, 1), "num_heads": 8},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64, "size": 64},
    "sequencer2d_s": {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "hidden_sizes": (4, 8, 8, 8)},
    "visformer_tiny": {"img_size": 32, "init_channels": 8, "embed_dim": 32, "depth": 1, "num_heads": 2},
    "levit_128s": {"img_size": 64, "size": 64},
    "xcit_nano_12_p8_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "gcvit_xxtiny": {"img_size": 64, "size": 64},
    "mambaout_femto": {},
    "fastvit_t8": {"size": 64},
    "efficientvit_b0": {},
    "res2net50_14w_8s": {"layers": (1, 1, 1, 1)},
    "inception_next_atto": {},
    "twins_svt_small": {"img_size": 64, "embed_dims": (16, 32, 32, 64), "depths": (1, 1, 1, 1), "size": 64},
}


def timm_model(name: str) -> Case:
    import timm

    options = {"size": 32, **TIMM[name]}
    size = options.pop("size")
    return classified(timm.create_model(name, num_classes=CLASSES, **options), images(size))


# Of vit-pytorch: module, class, what differs from the common sizes.
VIT_PYTORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit", {}),
    "SimpleViT": ("simple_vit", {}),
    "DeepViT": ("deepvit", {}),
    "CaiT": ("cait", {"cls_depth": 1}),
    "CCT": ("cct", {}),
    "CrossViT": ("cross_vit", {}),
    "CvT": ("cvt", {}),
    "LeViT": ("levit", {}),
    "PiT": ("pit", {}),
    "RegionViT": ("regionvit", {}),
    "MobileViT": ("mobile_vit", {}),
    "NesT": ("nest", {}),
    "XCiT": ("xcit", {"cls_depth": 1}),
    "ViTwithPatchDropout": ("vit_with_patch_dropout", {}),
    "NaViT": ("na_vit", {}),
}
COMMON_VIT = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "CCT": {"img_size": 32, "embedding_dim": 32, "n_conv_layers": 1, "kernel_size": 7, "stride": 2, "padding": 3,
            "num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0, "positional_embedding": "learnable"},
    "CrossViT": {"image_size": 32, "depth": 1, "sm_dim": 16, "sm_patch_size": 8, "sm_enc_depth": 1, "sm_enc_heads": 2,
                 "sm_enc_mlp_dim": 32, "sm_enc_dim_head": 8, "lg_dim": 32, "lg_patch_size": 16, "lg_enc_depth": 1,
                 "lg_enc_heads": 2, "lg_enc_mlp_dim": 32, "lg_enc_dim_head": 8, "cross_attn_depth": 1,
                 "cross_attn_heads": 2, "cross_attn_dim_head": 8},
    "CvT": {"s1_emb_dim": 16, "s1_heads": 1, "s1_depth": 1, "s2_emb_dim": 32, "s2_heads": 2, "s2_depth": 1,
            "s3_emb_dim": 32, "s3_heads": 2, "s3_depth": 1},
    "LeViT": {"image_size": 64, "stages": 2, "dim": (32, 48), "depth": 1, "heads": (2, 4), "mlp_mult": 2},
    "PiT": {"image_size": 32, "patch_size": 8, "dim": 32, "depth": (1, 1), "heads": 4, "mlp_dim": 64},
    "RegionViT": {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "window_size": 2, "local_patch_size": 2},
    "MobileViT": {"image_size": (64, 64), "dims": [16, 24, 32], "kernel_size": 3, "patch_size": (2, 2),
                  "channels": [8, 8, 12, 12, 16, 16, 24, 24, 32, 32, 48]},
    "NesT": {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1)},
    "ViTwithPatchDropout": {**COMMON_VIT, "patch_dropout": 0.5},
}  # fmt: skip


def vit_pytorch_model(name: str) -> Case:
    from importlib import import_module

    module, more = VIT_PYTORCH[name]
    make = getattr(import_module(f"vit_pytorch.{module}"), name.removesuffix("withPatchDropout"))
    sizes = OWN_SIZES.get(name, COMMON_VIT)
    size = sizes.get("image_size", sizes.get("img_size", 64))
    return classified(make(num_classes=CLASSES, **sizes, **more), images(size if isinstance(size, int) else size[0]))


def byol() -> Case:
    from byol_pytorch import BYOL
    from vit_pytorch import ViT

    net = ViT(num_classes=CLASSES, **COMMON_VIT)
    learner = BYOL(net, image_size=32, hidden_layer="to_latent", projection_size=16, projection_hidden_size=32,
                   augment_fn=torch.nn.Identity(), augment_fn2=torch.nn.Identity())  # fmt: skip
    return Case(learner, (images(32),))


def torchvision_model(name: str, size: int = 64) -> Case:
    import torchvision.models

    return classified(getattr(torchvision.models, name)(weights=None, num_classes=CLASSES), images(size))


def torchvision_vit() -> Case:
    from torchvision.models import VisionTransformer

    return classified(
        VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=CLASSES
        ),
        images(32),
    )


def torchvision_deeplab() -> Case:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    return Case(lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES), (images(64),))


def segmentation_model(name: str, encoder: str = "timm-mobilenetv3_small_minimal_100") -> Case:
    import segmentation_models_pytorch as smp

    model = getattr(smp, name)(encoder, encoder_weights=None, classes=4)
    loss = smp.losses.DiceLoss("multiclass")
    return Case(model, (images(64),), loss_fn=loss, target=torch.randint(4, (ROWS, 64, 64)))


def open_clip_model(name: str) -> Case:
    import open_clip
    from open_clip.coca_model import CoCa, MultimodalCfg
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32, output_tokens=name == "CoCa")
    text = CLIPTextCfg(context_length=12, vocab_size=VOCAB, width=32, heads=4, layers=2, output_tokens=name == "CoCa")
    ids = torch.randint(1, VOCAB, (ROWS, 12))
    if name == "CoCa":
        decoder = MultimodalCfg(context_length=12, vocab_size=VOCAB, width=32, heads=4, layers=1)
        model = CoCa(32, decoder, text, vision)
        for projection in (model.text.text_projection, model.text_decoder.text_projection):
            torch.nn.init.normal_(projection)  # it leaves them as the memory was
        return Case(model, (images(32), ids))
    loss = open_clip.ClipLoss() if name == "CLIP" else None
    return Case(CLIP(32, vision, text), (images(32), ids), loss_fn=_contrast(loss), target=torch.zeros(ROWS))


def _contrast(loss: Any) -> Callable[..., torch.Tensor]:
    return lambda output, target: loss(*output)


def monai_unet(name: str) -> Case:
    from monai.losses import DiceCELoss
    from monai.networks import nets

    sizes: dict[str, dict[str, Any]] = {
        "UNet": {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1},
        "BasicUNet": {"features": (8, 8, 16, 16, 32, 8)},
        "AttentionUnet": {"channels": (8, 16, 32), "strides": (2, 2)},
        "SegResNet": {"init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
        "DynUNet": {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2),
                    "filters": (8, 16, 32)},
        "UNETR": {"img_size": 32, "feature_size": 8, "hidden_size": 32, "mlp_dim": 64, "num_heads": 4},
        "SwinUNETR": {"feature_size": 12, "window_size": 2, "num_heads": (1, 2, 2, 4),
                      "norm_name": ("group", {"num_groups": 2})},
    }  # fmt: skip
    model = getattr(nets, name)(spatial_dims=2, in_channels=1, out_channels=3, **sizes[name])
    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    return Case(model, (images(32, 1),), loss_fn=loss, target=torch.randint(3, (ROWS, 1, 32, 32)))


def monai_autoencoder() -> Case:
    from monai.networks.nets import AutoencoderKL

    model = AutoencoderKL(2, 1, 1, 1, channels=(8, 16), attention_levels=(False, True), norm_num_groups=4)
    return Case(model, (images(16, 1),))


def spandrel_model(name: str) -> Case:
    if name == "SwinIR":
        from spandrel.architectures.SwinIR import SwinIR

        model: Any = SwinIR(img_size=16, window_size=4, depths=[2], embed_dim=16, num_heads=[2], mlp_ratio=2, upscale=2,
                            upsampler="pixelshuffledirect")  # fmt: skip
    elif name == "RRDBNet":
        from spandrel.architectures.ESRGAN import ESRGAN

        model = ESRGAN(num_filters=8, num_blocks=1, scale=2)
    elif name == "NAFNet":
        from spandrel.architectures.NAFNet import NAFNet

        model = NAFNet(width=8, middle_blk_num=1, enc_blk_nums=[1, 1], dec_blk_nums=[1, 1])
    else:
        from spandrel.architectures.HAT import HAT

        model = HAT(img_size=16, window_size=4, depths=(2,), embed_dim=16, num_heads=(2,), upscale=2,
                    upsampler="pixelshuffle", overlap_ratio=0.5, squeeze_factor=4, compress_ratio=2)  # fmt: skip
    return squared(model, images(16))


def kornia_model(name: str) -> Case:
    import kornia

    if name == "HardNet":
        return squared(kornia.feature.HardNet(pretrained=False), images(32, 1))
    if name == "augmentation":
        jitter = torch.nn.Sequential(
            kornia.filters.GaussianBlur2d((3, 3), (1.5, 1.5)), torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()
        )
        return squared(jitter, images(16))
    return squared(kornia.feature.SOSNet(pretrained=False), images(32, 1))


def mlp_mixer() -> Case:
    from mlp_mixer_pytorch import MLPMixer

    return classified(
        MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=CLASSES), images(32)
    )


def perceiver() -> Case:
    from perceiver_pytorch import Perceiver

    model = Perceiver(num_freq_bands=2, depth=2, max_freq=10.0, num_latents=8, latent_dim=32, cross_dim_head=8,
                      latent_heads=4, latent_dim_head=8, num_classes=CLASSES, weight_tie_layers=True)  # fmt: skip
    return classified(model, images(8).movedim(1, -1).contiguous())


def axial_attention() -> Case:
    from axial_attention import AxialImageTransformer

    return squared(AxialImageTransformer(dim=16, depth=2, heads=4, reversible=False), images(8, 16))


def axial_attention_reversible() -> Case:
    from axial_attention import AxialImageTransformer

    return squared(AxialImageTransformer(dim=16, depth=2, heads=4, reversible=True), images(8, 16))


def sam_encoder() -> Case:
    from segment_anything.modeling import ImageEncoderViT

    model = ImageEncoderViT(img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=4, out_chans=16, window_size=3,
                            use_rel_pos=True, global_attn_indexes=(1,))  # fmt: skip
    return squared(model, images(32))


def efficientnet() -> Case:
    from efficientnet_pytorch import EfficientNet

    return classified(EfficientNet.from_name("efficientnet-b0", num_classes=CLASSES, image_size=64), images(64))


def facenet() -> Case:
    from facenet_pytorch import InceptionResnetV1

    return classified(InceptionResnetV1(classify=True, num_classes=CLASSES), images(96))


def bottleneck_transformer() -> Case:
    from bottleneck_transformer_pytorch import BottleStack

    model = BottleStack(dim=16, fmap_size=8, dim_out=32, num_layers=2, heads=2, dim_head=8, rel_pos_emb=True)
    return squared(model, images(8, 16))


def lambda_layer() -> Case:
    from lambda_networks import LambdaLayer

    return squared(LambdaLayer(dim=16, dim_out=16, r=5, dim_k=8, heads=4, dim_u=1), images(8, 16))


def metaformer() -> Case:
    from x_metaformer import CAFormer

    return squared(CAFormer(3, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)), images(32))


def yolo(name: str) -> Case:
    from ultralytics.nn.tasks import DetectionModel

    return Case(DetectionModel(name, nc=4, verbose=False), (images(64),))


MODELS: dict[str, Callable[[], Case]] = {
    **{f"timm: {name}": partial(timm_model, name) for name in TIMM},
    **{f"vit-pytorch: {name}": partial(vit_pytorch_model, name) for name in VIT_PYTORCH},
    "byol-pytorch: BYOL": byol,
    "torchvision: shufflenet_v2_x0_5": partial(torchvision_model, "shufflenet_v2_x0_5"),
    "torchvision: squeezenet1_1": partial(torchvision_model, "squeezenet1_1"),
    "torchvision: mnasnet0_5": partial(torchvision_model, "mnasnet0_5"),
    "torchvision: regnet_y_400mf": partial(torchvision_model, "regnet_y_400mf"),
    "torchvision: ViT": torchvision_vit,
    "torchvision: LR-ASPP": torchvision_deeplab,
    **{
        f"segmentation-models-pytorch: {name}": partial(segmentation_model, name)
        for name in ("Unet", "FPN", "DeepLabV3Plus")
    },
    "segmentation-models-pytorch: Segformer": partial(segmentation_model, "Segformer", "mit_b0"),
    "open-clip-torch: CLIP": partial(open_clip_model, "CLIP"),
    "open-clip-torch: CoCa": partial(open_clip_model, "CoCa"),
    **{
        f"monai: {name}": partial(monai_unet, name)
        for name in ("UNet", "BasicUNet", "AttentionUnet", "SegResNet", "DynUNet", "UNETR", "SwinUNETR")
    },
    "monai: AutoencoderKL": monai_autoencoder,
    **{f"spandrel: {name}": partial(spandrel_model, name) for name in ("SwinIR", "RRDBNet", "NAFNet", "HAT")},
    **{f"kornia: {name}": partial(kornia_model, name) for name in ("HardNet", "SOSNet", "augmentation")},
    "mlp-mixer-pytorch: MLPMixer": mlp_mixer,
    "perceiver-pytorch: Perceiver": perceiver,
    "axial-attention: AxialImageTransformer": axial_attention,
    "axial-attention: reversible": axial_attention_reversible,
    "segment-anything: ImageEncoderViT": sam_encoder,
    "efficientnet-pytorch: EfficientNet": efficientnet,
    "facenet-pytorch: InceptionResnetV1": facenet,
    "bottleneck-transformer-pytorch: BottleStack": bottleneck_transformer,
    "lambda-networks: LambdaLayer": lambda_layer,
    "x-metaformer: CAFormer": metaformer,
    "ultralytics: YOLO11n": partial(yolo, "yolo11n.yaml"),
}
