"""Speech, images and medical images: models of packages that no other file of this folder's parent has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from by_others.case import CLASSES, LENGTH, ROWS, VOCAB, Case, classified, images, squared, token_loss, tokens, written
from by_others.unseen.numba_import import import_numba

# Speech and audio


def whisper() -> Case:
    import_numba()
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(16, 20, 32, 4, 2, VOCAB, LENGTH, 32, 4, 2))
    nn.init.normal_(model.decoder.positional_embedding)  # it leaves them as the memory was
    return Case(model, (torch.randn(ROWS, 16, 40), tokens()), loss_fn=token_loss, target=tokens())


def speaker_embedding() -> Case:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    model = ECAPA_TDNN(
        16, channels=[16, 16, 16, 16, 48], lin_neurons=16, attention_channels=8, res2net_scale=4, se_channels=8
    )
    lengths = torch.linspace(0.5, 1.0, ROWS)
    return squared(model, torch.randn(ROWS, 30, 16), lengths)


def recognition_transformer(kind: str) -> Case:
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    model = TransformerASR(
        VOCAB,
        16,
        d_model=32,
        nhead=4,
        num_encoder_layers=2,
        num_decoder_layers=1,
        d_ffn=64,
        encoder_module=kind,
        attention_type="RelPosMHAXL" if kind == "conformer" else "regularMHA",
        kernel_size=7,
        causal=False,
        normalize_before=True,
        csgu_linear_units=64,
    )
    lengths = torch.linspace(0.5, 1.0, ROWS)
    return Case(model, (torch.randn(ROWS, 20, 16), torch.randint(1, VOCAB, (ROWS, 6)), lengths))


def crdnn() -> Case:
    from speechbrain.lobes.models.CRDNN import CRDNN

    model = CRDNN(
        input_shape=[None, None, 16], cnn_channels=[4, 8], rnn_layers=1, rnn_neurons=16, dnn_neurons=16, dnn_blocks=1
    )
    return squared(model, torch.randn(ROWS, 20, 16))


def neural_codec() -> Case:
    from encodec.modules import SEANetDecoder, SEANetEncoder
    from encodec.quantization import ResidualVectorQuantizer

    def forward(self: Any, x: Tensor) -> Any:
        quantized = self.quantizer(self.encoder(x), 50, 1.2)
        return (self.decoder(quantized.quantized) - x).abs().mean() + quantized.penalty

    sizes = {"channels": 1, "dimension": 16, "n_filters": 4, "ratios": [4, 2], "lstm": 1}
    return written(
        forward,
        torch.randn(ROWS, 1, 160),
        encoder=SEANetEncoder(**sizes),
        decoder=SEANetDecoder(**sizes),
        quantizer=ResidualVectorQuantizer(dimension=16, n_q=4, bins=16, kmeans_init=False),
    )


def vocoder() -> Case:
    from auraloss.freq import MultiResolutionSTFTLoss
    from vocos.heads import ISTFTHead
    from vocos.models import VocosBackbone

    def forward(self: Any, mel: Tensor, audio: Tensor) -> Tensor:
        return self.loss(self.head(self.backbone(mel)).unsqueeze(1), audio.unsqueeze(1))

    loss = MultiResolutionSTFTLoss(fft_sizes=[64, 32], hop_sizes=[16, 8], win_lengths=[64, 32])
    return written(
        forward,
        torch.randn(ROWS, 16, 20),
        torch.randn(ROWS, 320),
        loss=loss,
        backbone=VocosBackbone(input_channels=16, dim=32, intermediate_dim=64, num_layers=2),
        head=ISTFTHead(dim=32, n_fft=64, hop_length=16, padding="same"),
    )


def multi_scale_codec() -> Case:
    from snac import SNAC

    model = SNAC(
        encoder_dim=16,
        encoder_rates=[2, 4],
        decoder_dim=64,
        decoder_rates=[4, 2],
        attn_window_size=4,
        codebook_size=16,
        codebook_dim=4,
        vq_strides=[4, 2, 1],
    )
    return Case(model, (torch.randn(ROWS, 1, 256),))


def separation() -> Case:
    from torchaudio.models import ConvTasNet

    model = ConvTasNet(
        num_sources=2,
        enc_kernel_size=8,
        enc_num_feats=16,
        msk_kernel_size=3,
        msk_num_feats=8,
        msk_num_hidden_feats=16,
        msk_num_layers=2,
        msk_num_stacks=2,
    )
    return squared(model, torch.randn(ROWS, 1, 128))


def streaming_transducer() -> Case:
    from torchaudio.models import emformer_rnnt_model

    model = emformer_rnnt_model(
        input_dim=8,
        encoding_dim=16,
        num_symbols=32,
        segment_length=8,
        right_context_length=4,
        time_reduction_input_dim=8,
        time_reduction_stride=4,
        transformer_num_heads=2,
        transformer_ffn_dim=32,
        transformer_num_layers=2,
        transformer_dropout=0.1,
        transformer_activation="gelu",
        transformer_left_context_length=4,
        transformer_max_memory_size=0,
        transformer_weight_init_scale_strategy="depthwise",
        transformer_tanh_on_mem=True,
        symbol_embedding_dim=16,
        num_lstm_layers=1,
        lstm_layer_norm=True,
        lstm_layer_norm_epsilon=1e-3,
        lstm_dropout=0.1,
    )
    lengths, words = torch.full((ROWS,), 32, dtype=torch.int32), torch.full((ROWS,), 5, dtype=torch.int32)
    return Case(model, (torch.randn(ROWS, 36, 8), lengths, torch.randint(0, 32, (ROWS, 5), dtype=torch.int32), words))


def spoken_synthesis() -> Case:
    from torchaudio.models import Tacotron2

    model = Tacotron2(
        n_mels=8,
        n_symbol=40,
        symbol_embedding_dim=16,
        encoder_embedding_dim=16,
        encoder_n_convolution=2,
        attention_rnn_dim=16,
        attention_hidden_dim=8,
        attention_location_n_filter=4,
        attention_location_kernel_size=5,
        decoder_rnn_dim=16,
        prenet_dim=8,
        postnet_n_convolution=2,
        postnet_embedding_dim=8,
    )
    lengths = torch.arange(10, 10 - ROWS, -1).clamp(min=4)
    frames = torch.arange(9, 9 - ROWS, -1).clamp(min=4)
    return Case(model, (torch.randint(40, (ROWS, 10)), lengths, torch.randn(ROWS, 8, 9), frames))


# Images


def text_recognition() -> Case:
    from easyocr.model.vgg_model import Model

    def loss(output: Tensor, target: Tensor) -> Tensor:
        steps = torch.full((ROWS,), output.size(1), dtype=torch.long)
        words = torch.full((ROWS,), target.size(1), dtype=torch.long)
        return nn.functional.ctc_loss(output.log_softmax(2).permute(1, 0, 2), target, steps, words, zero_infinity=True)

    model = Model(1, 32, 16, 30)
    return Case(model, (torch.randn(ROWS, 1, 32, 64), ""), loss_fn=loss, target=torch.randint(1, 30, (ROWS, 5)))


def document_text(name: str) -> Case:
    from doctr.models import recognition

    model = getattr(recognition, name)(pretrained=False, pretrained_backbone=False, vocab="abcdefgh")
    words = ["abc", "bad", "cafe", "deaf", "egg", "face", "gab", "head"]
    return Case(model.train(), (torch.rand(ROWS, 3, 32, 128), words))


def perceptual() -> Case:
    from lpips import LPIPS

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.loss(self.net(x).tanh(), x, normalize=True).mean()

    loss = LPIPS(pretrained=False, net="alex", pnet_rand=True, verbose=False).requires_grad_(False)
    return written(forward, torch.rand(4, 3, 64, 64), net=nn.Conv2d(3, 3, 3, padding=1), loss=loss)


def structural_similarity() -> Case:
    from pytorch_msssim import MS_SSIM

    def forward(self: Any, x: Tensor) -> Tensor:
        return 1 - self.loss(self.net(x).sigmoid(), x)

    return written(
        forward,
        torch.rand(ROWS, 1, 64, 64),
        net=nn.Conv2d(1, 1, 3, padding=1),
        loss=MS_SSIM(data_range=1.0, win_size=3, channel=1),
    )


def efficient_detection() -> Case:
    from effdet import DetBenchTrain, EfficientDet, get_efficientdet_config

    config = get_efficientdet_config("tf_efficientdet_lite0")
    config.update(
        {
            "image_size": (64, 64),
            "num_classes": 3,
            "fpn_channels": 16,
            "fpn_cell_repeats": 1,
            "box_class_repeats": 1,
            "max_level": 5,
            "num_levels": 3,
        }
    )
    model = DetBenchTrain(EfficientDet(config, pretrained_backbone=False))
    corner = 30 * torch.rand(4, 3, 2)
    target = {
        "bbox": torch.cat([corner, corner + 8 + 20 * torch.rand(4, 3, 2)], -1),
        "cls": torch.randint(1, 4, (4, 3)),
    }
    return Case(model, (torch.randn(4, 3, 64, 64), target))


def anchor_free_detection() -> Case:
    from torchvision.models.detection import FCOS
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1))
    backbone.out_channels = 32  # type: ignore[assignment]
    model = FCOS(
        backbone, num_classes=3, min_size=32, max_size=32, anchor_generator=AnchorGenerator(((8,),), ((1.0,),))
    )
    corner = 12 * torch.rand(4, 2, 2)
    boxes = torch.cat([corner, corner + 6 + 12 * torch.rand(4, 2, 2)], -1)
    targets = [{"boxes": b, "labels": torch.randint(1, 3, (2,))} for b in boxes]
    return Case(model, (list(torch.rand(4, 3, 32, 32)), targets))


def optical_flow() -> Case:
    from torchvision.models.optical_flow import raft_small

    def loss(output: list[Tensor], target: Tensor) -> Tensor:
        return sum(0.8 ** (len(output) - 1 - i) * (o - target).abs().mean() for i, o in enumerate(output))  # type: ignore

    flow = torch.randn(2, 2, 128, 128)
    return Case(raft_small(), (images(128)[:2], images(128)[:2]), {"num_flow_updates": 2}, loss, flow)


def video_network() -> Case:
    from torchvision.models.video import r3d_18

    return classified(r3d_18(weights=None, num_classes=CLASSES), torch.randn(ROWS, 3, 4, 16, 16))


def yolo_loss(name: str) -> Case:
    from types import SimpleNamespace

    from ultralytics.nn.tasks import DetectionModel, SegmentationModel

    model = (SegmentationModel if "seg" in name else DetectionModel)(name, nc=3, verbose=False)
    model.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5, overlap_mask=True, mask_ratio=4)
    batch = {
        "img": torch.rand(4, 3, 64, 64),
        "batch_idx": torch.arange(4.0),
        "cls": torch.randint(3, (4, 1)).float(),
        "bboxes": 0.3 + 0.3 * torch.rand(4, 4),
        "masks": torch.ones(4, 16, 16),
    }
    return Case(model, (batch,))


def self_distillation() -> Case:
    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    class DINO(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.student_head = DINOProjectionHead(16, 32, 8, 24, freeze_last_layer=1)
            self.teacher, self.teacher_head = copy.deepcopy(self.student), DINOProjectionHead(16, 32, 8, 24)
            deactivate_requires_grad(self.teacher)
            deactivate_requires_grad(self.teacher_head)
            self.criterion = DINOLoss(output_dim=24, warmup_teacher_temp_epochs=5)

        def forward(self, views: list[Tensor]) -> Tensor:
            update_momentum(self.student, self.teacher, m=0.99)
            update_momentum(self.student_head, self.teacher_head, m=0.99)
            teacher = [self.teacher_head(self.teacher(view)).detach() for view in views[:2]]
            student = [self.student_head(self.student(view)) for view in views]
            return self.criterion(teacher, student, epoch=0)

    return Case(DINO(), ([images(16), images(16), images(8)],))


def swapped_assignments() -> Case:
    from lightly.loss import SwaVLoss
    from lightly.models.modules import SwaVPrototypes

    def forward(self: Any, views: list[Tensor]) -> Tensor:
        self.prototypes.normalize()
        scores = [self.prototypes(nn.functional.normalize(self.net(v), dim=1)) for v in views]
        return self.loss(scores[:2], scores[2:])

    net = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return written(
        forward, [images(16), images(16), images(8)], net=net, prototypes=SwaVPrototypes(16, 12), loss=SwaVLoss()
    )


def regularized_variance() -> Case:
    from lightly.loss import VICRegLoss

    def forward(self: Any, one: Tensor, two: Tensor) -> Tensor:
        return self.loss(self.net(one), self.net(two))

    net = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return written(forward, images(16), images(16), net=net, loss=VICRegLoss())


# Medical images and signals


def residual_unet() -> Case:
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    model = ResidualEncoderUNet(
        1,
        3,
        (8, 16, 16),
        nn.Conv3d,
        3,
        (1, 2, 2),
        (1, 1, 1),
        3,
        (1, 1),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )

    def loss(outputs: list[Tensor], target: Tensor) -> Tensor:
        total = torch.zeros(())
        for scale, output in enumerate(outputs):
            step = 2**scale
            total = total + 0.5**scale * nn.functional.cross_entropy(output, target[:, ::step, ::step, ::step])
        return total

    return Case(model, (torch.randn(ROWS, 1, 8, 8, 8),), loss_fn=loss, target=torch.randint(3, (ROWS, 8, 8, 8)))


def chest_xray() -> Case:
    from torchxrayvision.models import DenseNet

    model = DenseNet(num_classes=5, growth_rate=4, block_config=(1, 1, 1, 1), num_init_features=8, bn_size=2)
    return squared(model, images(64, 1))


def brain_signals(name: str) -> Case:
    from braindecode import models

    sizes: dict[str, Any] = {"n_chans": 8, "n_outputs": 4, "n_times": 256, "sfreq": 64}
    more = {"EEGConformer": {"num_layers": 2}}.get(name, {})
    model = getattr(models, name)(**sizes, **more)
    return Case(
        model, (torch.randn(ROWS, 8, 256),), loss_fn=nn.functional.cross_entropy, target=torch.randint(4, (ROWS,))
    )


def registration() -> Case:
    from monai.losses import BendingEnergyLoss
    from monai.networks.blocks import Warp
    from monai.networks.nets import LocalNet

    def forward(self: Any, moving: Tensor, fixed: Tensor) -> Tensor:
        field = self.net(torch.cat([moving, fixed], 1))
        return ((self.warp(moving, field) - fixed) ** 2).mean() + 0.1 * self.smooth(field)

    net = LocalNet(
        spatial_dims=2,
        in_channels=2,
        num_channel_initial=4,
        extract_levels=[2],
        out_channels=2,
        out_activation=None,
        out_kernel_initializer="zeros",
    )
    return written(forward, images(16, 1), images(16, 1), net=net, warp=Warp(), smooth=BendingEnergyLoss())


def diffusion_unet() -> Case:
    from monai.networks.nets import DiffusionModelUNet

    model = DiffusionModelUNet(
        2,
        1,
        1,
        num_res_blocks=1,
        channels=(8, 16),
        attention_levels=(False, True),
        norm_num_groups=4,
        num_head_channels=8,
        with_conditioning=True,
        cross_attention_dim=16,
    )
    return squared(model, images(8, 1), torch.randint(1000, (ROWS,)), torch.randn(ROWS, 2, 16))


MODELS: dict[str, Callable[[], Case]] = {
    "openai-whisper: Whisper": whisper,
    "speechbrain: ECAPA-TDNN": speaker_embedding,
    "speechbrain: Transformer": lambda: recognition_transformer("transformer"),
    "speechbrain: Conformer": lambda: recognition_transformer("conformer"),
    "speechbrain: CRDNN": crdnn,
    "encodec: SEANet with a quantizer": neural_codec,
    "vocos: vocoder with a spectral loss of auraloss": vocoder,
    "snac: SNAC": multi_scale_codec,
    "torchaudio: ConvTasNet": separation,
    "torchaudio: Emformer transducer": streaming_transducer,
    "torchaudio: Tacotron2": spoken_synthesis,
    "easyocr: CRNN with CTC": text_recognition,
    "python-doctr: CRNN": lambda: document_text("crnn_mobilenet_v3_small"),
    "python-doctr: ViTSTR": lambda: document_text("vitstr_small"),
    "lpips: perceptual loss": perceptual,
    "pytorch-msssim: MS-SSIM loss": structural_similarity,
    "effdet: EfficientDet with its loss": efficient_detection,
    "torchvision: FCOS with its loss": anchor_free_detection,
    "torchvision: RAFT": optical_flow,
    "torchvision: r3d_18": video_network,
    "ultralytics: YOLOv8n with its loss": lambda: yolo_loss("yolov8n.yaml"),
    "ultralytics: YOLO11n-seg with its loss": lambda: yolo_loss("yolo11n-seg.yaml"),
    "lightly: DINO": self_distillation,
    "lightly: SwaV": swapped_assignments,
    "lightly: VICReg": regularized_variance,
    "dynamic-network-architectures: ResidualEncoderUNet": residual_unet,
    "torchxrayvision: DenseNet": chest_xray,
    "braindecode: EEGNet": lambda: brain_signals("EEGNet"),
    "braindecode: EEGConformer": lambda: brain_signals("EEGConformer"),
    "monai: registration by LocalNet": registration,
    "monai: DiffusionModelUNet": diffusion_unet,
}
