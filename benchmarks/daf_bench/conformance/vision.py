"""Networks for images: families of ``timm``, torchvision's detection and segmentation.

All have random weights and small images. Both packages are optional.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from daf_bench.conformance.case import Case, Work

BATCH, CLASSES, IMAGE = 4, 8, 32
LARGER: dict[str, Any] = {"img_size": 64}
IMAGES = {"ghostnetv2_100": 64}  # halves them once more than others do
# Of a detector's two stages: usually hundreds, whose features are sampled slowly in Python.
FEW_REGIONS = {"rpn_post_nms_top_n_train": 24, "box_batch_size_per_image": 8}
# torchvision's native operators that its Python part registers kernels for.
_NATIVE = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_LIBRARIES: list[torch.library.Library] = []


def load_torchvision() -> None:
    """Import torchvision, also where its native operators do not load.

    Wheels of another build of PyTorch leave these out; suppression of boxes is then done in Python.

    Raises:
        ImportError: torchvision is not installed.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise ImportError(f"torchvision does not load: {error}") from error
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for schema in _NATIVE:
            library.define(schema)
        library.impl("nms", suppressed, "CPU")
        _LIBRARIES.append(library)  # operators live as long as their library
        from torchvision.ops import boxes

        boxes._assert_has_ops = lambda: None
        # Compiled, it takes seconds for each number of regions.
        regions = sys.modules["torchvision.ops.roi_align"]
        regions._roi_align = regions._roi_align.__wrapped__  # type: ignore[attr-defined]


def suppressed(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Return which of the boxes [N, 4] are kept, best first: none overlaps a better one."""
    corners = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    opposite = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    common = (opposite - corners).clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    overlaps = common > threshold * (areas[:, None] + areas[None, :] - common)
    is_free = torch.ones(len(boxes), dtype=torch.bool)
    kept: list[int] = []
    for each in scores.argsort(descending=True, stable=True).tolist():
        if is_free[each]:
            kept.append(each)
            is_free &= ~overlaps[each]
    return torch.tensor(kept, dtype=torch.int64)


# A small network of each family, with options that make it smaller.
TIMM: dict[str, dict[str, Any]] = {
    **{key: {**LARGER, "depth": 2} for key in ("vit_tiny_patch16_224", "deit_tiny_patch16_224")},
    **{key: {**LARGER, "depth": 2} for key in ("convit_tiny", "cait_xxs24_224")},
    **{key: {**LARGER, "depth": 2} for key in ("eva02_tiny_patch14_224", "xcit_nano_12_p16_224")},
    **dict.fromkeys(("coat_lite_tiny", "coatnet_pico_rw_224", "efficientformerv2_s0"), LARGER),
    **dict.fromkeys(("gmlp_ti16_224", "pit_ti_224", "visformer_tiny"), LARGER),
    **{key: {} for key in ("convnext_atto", "convnextv2_atto", "inception_next_atto")},
    **{key: {} for key in ("densenet121", "dla46_c", "edgenext_xx_small", "efficientnet_b0")},
    **{key: {} for key in ("efficientvit_b0", "fbnetc_100", "gernet_s", "ghostnet_050")},
    **{key: {} for key in ("ghostnetv2_100", "hardcorenas_a", "hrnet_w18_small", "lcnet_035")},
    **{key: {} for key in ("mnasnet_small", "mobilenetv2_035", "mobilenetv3_small_050")},
    **{key: {} for key in ("mobilenetv4_conv_small_035", "mobilevit_xxs", "mobilevitv2_050")},
    **{key: {} for key in ("poolformerv2_s12", "pvt_v2_b0", "regnetx_002", "regnety_002")},
    **{key: {} for key in ("regnetz_005", "repghostnet_050", "repvgg_a0", "resnet10t")},
    **{key: {} for key in ("resnetv2_18", "semnasnet_075", "shvit_s1", "starnet_s050")},
    **{key: {} for key in ("test_byobnet", "test_mambaout", "test_nfnet", "tinynet_e")},
}


def timm_cases() -> list[Case]:
    """Return a case for each family.

    Raises:
        ImportError: ``timm`` or torchvision is not installed.
    """
    load_torchvision()
    import timm  # noqa: F401

    return [Case(f"timm/{name}", partial(_timm, name, options)) for name, options in TIMM.items()]


def _timm(name: str, options: dict[str, Any]) -> Work:
    import timm

    size = options.get("img_size", IMAGES.get(name, IMAGE))
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    batch = (torch.randn(BATCH, 3, size, size), torch.randint(0, CLASSES, (BATCH,)))
    return Work(model.train(), batch, _classified)


def _classified(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])
    return nn.functional.cross_entropy(scores, batch[1])


def torchvision_cases() -> list[Case]:
    """Return cases of detection, segmentation and classification.

    Raises:
        ImportError: torchvision is not installed.
    """
    load_torchvision()
    return [Case(f"torchvision/{name}", build) for name, build in _TORCHVISION.items()]


def _backbone() -> nn.Module:
    """Return a small network of images to one map of 32 channels."""
    body = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, 4, 1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
    )
    body.out_channels = 32  # type: ignore[assignment]
    return body


def _scenes(**more: Any) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return images of different sizes, and boxes of their things."""
    images, targets = [], []
    for place in range(BATCH):
        images.append(torch.rand(3, 64 + 8 * place, 64))
        low = torch.rand(1 + place % 3, 2) * 30
        boxes = torch.cat([low, low + 8 + torch.rand_like(low) * 24], 1)
        target = {"boxes": boxes, "labels": torch.randint(1, 3, (len(boxes),))}
        if more.get("masks"):
            target["masks"] = torch.randint(0, 2, (len(boxes), *images[-1].shape[1:])).byte()
        if more.get("keypoints"):
            points = torch.cat([low + 4, torch.ones(len(boxes), 1)], 1)
            target["keypoints"] = points[:, None].repeat(1, 3, 1)
        targets.append(target)
    return images, targets


def _detected(model: nn.Module, batch: Any) -> Tensor:
    losses: dict[str, Tensor] = model(*batch)
    return torch.stack(list(losses.values())).sum()


def _detector(name: str) -> Work:
    from torchvision.models import detection
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    sizes: dict[str, Any] = {"min_size": 64, "max_size": 96}
    if name == "FCOS":
        single = AnchorGenerator(((16,),), ((1.0,),))
        model = detection.FCOS(_backbone(), 3, anchor_generator=single, **sizes)
    elif name == "RetinaNet":
        model = detection.RetinaNet(_backbone(), 3, anchor_generator=anchors, **sizes)
    else:
        options: dict[str, Any] = {"num_keypoints": 3} if name == "KeypointRCNN" else {}
        if name == "MaskRCNN":
            predictor = detection.mask_rcnn.MaskRCNNPredictor(256, 32, 3)
            options = {"mask_predictor": predictor}
        make = getattr(detection, name)
        model = make(
            _backbone(), rpn_anchor_generator=anchors, box_head=_box_head(), **options, **sizes,
            **_pooled(name), **FEW_REGIONS,
        )  # fmt: skip
        model.roi_heads.box_predictor = detection.faster_rcnn.FastRCNNPredictor(64, 3)
    scenes = _scenes(masks=name == "MaskRCNN", keypoints=name == "KeypointRCNN")
    return Work(model.train(), scenes, _detected)


def _box_head() -> nn.Module:
    from torchvision.models.detection.faster_rcnn import TwoMLPHead

    return TwoMLPHead(32 * 7 * 7, 64)


def _pooled(name: str) -> dict[str, Any]:
    """Return arguments for the single map that the backbone gives."""
    from torchvision.ops import MultiScaleRoIAlign

    kinds = {"box": 7, "mask": 14, "keypoint": 14}
    wanted = ["box", *(k for k in kinds if k in name.lower())]
    return {f"{k}_roi_pool": MultiScaleRoIAlign(["0"], kinds[k], 2) for k in wanted} | (
        {"box_predictor": nn.Identity(), "num_classes": None}
    )


def _segmenter(name: str) -> Work:
    from torchvision.models import segmentation

    make = getattr(segmentation, name)
    model = make(weights=None, weights_backbone=None, num_classes=CLASSES)
    labels = torch.randint(0, CLASSES, (BATCH, IMAGE, IMAGE))
    labels[: BATCH // 2, : IMAGE // 2] = 255

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])["out"]
        return nn.functional.cross_entropy(scores, batch[1], ignore_index=255)

    return Work(model.train(), (torch.randn(BATCH, 3, IMAGE, IMAGE), labels), loss)


def _classifier(name: str) -> Work:
    from torchvision import models

    model = getattr(models, name)(weights=None, num_classes=CLASSES)
    batch = (torch.randn(BATCH, 3, 64, 64), torch.randint(0, CLASSES, (BATCH,)))
    return Work(model.train(), batch, _classified)


_TORCHVISION = {
    **{n: partial(_detector, n) for n in ("FasterRCNN", "MaskRCNN", "KeypointRCNN")},
    **{n: partial(_detector, n) for n in ("RetinaNet", "FCOS")},
    **{n: partial(_segmenter, n) for n in ("lraspp_mobilenet_v3_large",)},
    **{n: partial(_segmenter, n) for n in ("deeplabv3_mobilenet_v3_large",)},
    **{n: partial(_classifier, n) for n in ("squeezenet1_1", "shufflenet_v2_x0_5")},
}
