"""``VQFusion``: codes learned from several embeddings and labels of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrec_jagged_attn.base.checks import (
    check_bool,
    check_device,
    check_int,
    check_numbers,
    check_same,
    check_shape,
)
from torchrec_jagged_attn.semantic_ids.discrete_pca import DiscretePCA

LOSSES = ("cosine", "mse")
COMMITMENT_WEIGHT = 0.25


class Fused(NamedTuple):
    """The output of :class:`VQFusion`.

    Attributes:
        loss: the sum of all losses, with the commitment loss weighted by 0.25.
        losses: the unweighted losses, by the names of embeddings and labels, and ``"commitment"``.
        codes: ``[N, L]`` int8; ``None`` if latents were not quantized.
    """

    loss: Tensor
    losses: dict[str, Tensor]
    codes: Tensor | None


class VQFusion(nn.Module):
    r"""An autoencoder of several embeddings and labels, whose latents are codes.

    A network encodes the concatenated embeddings of a row as its latent :math:`z`, which
    :class:`DiscretePCA` quantizes to :math:`\hat z = \mu + B^T c`. From the quantized latent, one
    decoder per embedding reconstructs it, and one head per label classifies it.

    .. math:: loss = \sum_e d(\mathrm{decoder}_e(\hat z), x_e)
              + \sum_y \mathrm{cross\ entropy}(\mathrm{head}_y(\hat z), y)
              + \frac{1}{4} \, |z - \hat z|^2 / D

    Gradients pass straight through the codes, from :math:`\hat z` to :math:`z`; mean and basis have
    gradients, too. The last term, the commitment loss, has a gradient of the latents only.

    Train it for some epochs with ``quantize=False``, call :meth:`fit`, which computes mean and
    basis from the latents, then train it further. Under ``DistributedDataParallel``, every rank
    calls :meth:`fit` of the wrapped module with its own batches. For other weights, sum up the
    returned ``losses``.

    Args:
        embeddings: the width of each embedding, by name.
        labels: the number of classes of each label, by name; may be empty.
        latent_dim: width of the latents, ``D``.
        num_codes, num_levels: see :class:`DiscretePCA`.
        hidden_dim: width of the hidden layer of the encoder and of each decoder.
        losses: the loss of each embedding, by name: ``"cosine"``, one minus the cosine of the
            angle, or ``"mse"``. With ``"cosine"``, the default, the length of the embedding is
            ignored.
        device: device of all parameters.

    Attributes:
        pca: the :class:`DiscretePCA` of the latents, which :class:`JaggedTargetAttention` takes as
            ``history_codes`` for the codes of :meth:`encode`.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: there is no embedding, a size is less than 1, or a name is unknown or duplicate.

    Example:
        >>> fusion = VQFusion({"text": 6, "image": 4}, {"kind": 3}, latent_dim=4, num_codes=10)
        >>> rows = {"text": torch.randn(8, 6), "image": torch.randn(8, 4)}
        >>> fused = fusion(rows, {"kind": torch.arange(8) % 3}, quantize=False)
        >>> sorted(fused.losses)
        ['image', 'kind', 'text']
        >>> errors = fusion.fit([rows])
        >>> fusion(rows, {"kind": torch.arange(8) % 3}).loss.backward()
        >>> fusion.encode(rows).shape, fusion.pca.packed_codes.num_bytes
        (torch.Size([8, 10]), 2)

    Source:
        After the abstract of SIDE (https://arxiv.org/abs/2506.16698), which names VQ fusion, a
        multi-task VQ-VAE of content embeddings and categorical labels. The algorithm is our own.
    """

    def __init__(
        self,
        embeddings: Mapping[str, int],
        labels: Mapping[str, int] | None = None,
        *,
        latent_dim: int,
        num_codes: int,
        num_levels: int = 3,
        hidden_dim: int = 256,
        losses: Mapping[str, Literal["cosine", "mse"]] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_device(device)
        labels = {} if labels is None else labels
        losses = {} if losses is None else losses
        check_int(latent_dim, "latent_dim", 1)
        check_int(hidden_dim, "hidden_dim", 1)
        for argument, sizes in (("embeddings", embeddings), ("labels", labels)):
            _check_mapping(argument, sizes, "sizes")
            for name, size in sizes.items():
                check_int(size, f"{argument}[{name!r}]", 1)
        if not embeddings:
            raise ValueError("embeddings must hold at least one width, got none")
        names = [*embeddings, *labels, "commitment"]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                "embeddings and labels must have different names, none of them 'commitment', got "
                f"{repeated} more than once"
            )
        _check_mapping("losses", losses, "losses")
        if unknown := sorted(losses.keys() - embeddings.keys()):
            raise ValueError(f"losses must have keys of {sorted(embeddings)}, got {unknown}")
        if wrong := [loss for loss in losses.values() if loss not in LOSSES]:
            raise ValueError(f"losses must be {' or '.join(LOSSES)}, got {wrong}")
        self.embeddings, self.labels = dict(embeddings), dict(labels)
        self.losses = {name: losses.get(name, "cosine") for name in embeddings}

        def mlp(in_dim: int, out_dim: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(in_dim, hidden_dim, device=device),
                nn.ReLU(),
                nn.Linear(hidden_dim, out_dim, device=device),
            )

        self.encoder = mlp(sum(embeddings.values()), latent_dim)
        self.pca = DiscretePCA(latent_dim, num_codes, num_levels, trainable=True, device=device)
        self.decoders = nn.ModuleList(mlp(latent_dim, width) for width in embeddings.values())
        self.heads = nn.ModuleList(
            nn.Linear(latent_dim, classes, device=device) for classes in labels.values()
        )

    def forward(
        self,
        embeddings: Mapping[str, Tensor],
        labels: Mapping[str, Tensor] | None = None,
        *,
        quantize: bool = True,
    ) -> Fused:
        """Compute the losses of a batch.

        Args:
            embeddings: ``[N, width]`` by name, in the dtype of the parameters. The losses of an
                empty batch are zero.
            labels: ``[N]`` int64 classes, by name.
            quantize: whether decoders and heads read quantized latents.

        Raises:
            TypeError: a dtype does not fit.
            ValueError: a name is missing or unknown, or a shape or device does not fit; or (on CPU,
                or under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) a class is out of range, or
                ``quantize`` is True before :meth:`fit`.
        """
        check_bool(quantize, "quantize")
        labels = {} if labels is None else labels
        latents = self._latents(embeddings)
        _check_names("labels", labels, self.labels)
        for name, label in labels.items():
            check_shape(label, f"labels[{name!r}]", "[N]", (len(latents),))
            check_same(latents, "embeddings", dtype=False, **{f"labels[{name!r}]": label})
            if label.dtype != torch.int64:
                raise TypeError(f"labels[{name!r}] must be int64, got {label.dtype}")
            check_numbers(label, f"labels[{name!r}]", self.labels[name])
        decoded, codes, losses = latents, None, {}
        reduction = "mean" if len(latents) else "sum"  # the mean of an empty batch would be NaN
        if quantize:
            codes = self.pca.encode(latents.detach())
            decoded = self.pca.decode(codes)
            losses["commitment"] = F.mse_loss(latents, decoded.detach(), reduction=reduction)
            decoded = decoded + (latents - latents.detach())
        else:  # zeros, so that all parameters have a gradient, as DistributedDataParallel expects
            decoded = decoded + 0 * (self.pca.mean.sum() + self.pca.basis.sum())
        for decoder, (name, loss) in zip(self.decoders, self.losses.items(), strict=True):
            output, expected = decoder(decoded), embeddings[name]
            if loss == "cosine":
                distances = 1 - F.cosine_similarity(output, _normalize(expected))
                losses[name] = distances.mean() if len(latents) else distances.sum()
            else:
                losses[name] = F.mse_loss(output, expected, reduction=reduction)
        for head, name in zip(self.heads, self.labels, strict=True):
            losses[name] = F.cross_entropy(head(decoded), labels[name], reduction=reduction)
        terms = dict(losses)
        if quantize:
            terms["commitment"] = COMMITMENT_WEIGHT * losses["commitment"]
        return Fused(torch.stack([*terms.values()]).sum(), losses, codes)

    @torch.no_grad()
    def fit(self, batches: Iterable[Mapping[str, Tensor]], **options: Any) -> list[float]:
        """Compute mean and basis from the latents of ``batches`` by :meth:`DiscretePCA.fit`.

        If a process group is initialized, every rank must call it with its own batches.

        Args:
            batches: embeddings, see :meth:`forward`. All their latents are held in memory.
            options: options of :meth:`DiscretePCA.fit`.

        Returns:
            The errors that :meth:`DiscretePCA.fit` returns.
        """
        if not isinstance(batches, Iterable) or isinstance(batches, Mapping):
            raise TypeError(
                f"batches must be batches of embeddings, got a {type(batches).__name__}"
            )
        return self.pca.fit([self._latents(batch) for batch in batches], **options)

    @torch.no_grad()
    def encode(self, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Encode embeddings, see :meth:`forward`, as codes ``[N, L]`` int8."""
        return self.pca.encode(self._latents(embeddings))

    def _latents(self, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Check embeddings and return their latents ``[N, D]``."""
        _check_names("embeddings", embeddings, self.embeddings)
        inputs, num_rows = [], None
        for name, width in self.embeddings.items():
            x = embeddings[name]
            check_shape(x, f"embeddings[{name!r}]", "[N, width]", (num_rows, width))
            check_same(self.pca.mean, "mean", dtype=True, **{f"embeddings[{name!r}]": x})
            num_rows = len(x)
            inputs.append(_normalize(x) * width**0.5 if self.losses[name] == "cosine" else x)
        return self.encoder(torch.cat(inputs, 1))


def _normalize(rows: Tensor) -> Tensor:
    """Scale ``rows`` of any scale to length 1; zeros stay zeros."""
    largest = rows.abs().amax(1, keepdim=True)
    return F.normalize(rows / torch.where(largest > 0, largest, 1))


def _check_mapping(argument: str, value: object, values: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{argument} must be {values} by name, got a {type(value).__name__}")


def _check_names(argument: str, tensors: Mapping[str, Tensor], expected: dict[str, int]) -> None:
    _check_mapping(argument, tensors, "tensors")
    if tensors.keys() != expected.keys():
        raise ValueError(
            f"{argument} must have the names {sorted(expected)}, got {sorted(tensors)}"
        )
