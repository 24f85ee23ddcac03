"""``VQFusion``: codes of what several embeddings and labels say of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchrec_jagged_attn.checks import (
    check_bool,
    check_device,
    check_int,
    check_numbers,
    check_real,
    check_same,
    check_shape,
    check_tensor,
)
from torchrec_jagged_attn.semantic_ids.discrete_pca import DiscretePCA

LOSSES = ("cosine", "mse")


class Fused(NamedTuple):
    """What :class:`VQFusion` returns.

    Attributes:
        loss: the sum of all losses, each times its weight.
        losses: by the names of embeddings and labels, and ``"commitment"``, without weights.
        codes: ``[N, L]`` int8; ``None`` where latents were not quantized.
    """

    loss: Tensor
    losses: dict[str, Tensor]
    codes: Tensor | None


class VQFusion(nn.Module):
    r"""An autoencoder of several embeddings and labels, whose latents are codes.

    A network encodes the concatenated embeddings of a row as its latent :math:`z`, which
    :class:`DiscretePCA` quantizes to :math:`\hat z = \mu + B^T c`. From the quantized latent, a
    decoder for each embedding reconstructs it, and a head for each label classifies it.

    .. math:: loss = \sum_e w_e \, d(\mathrm{decoder}_e(\hat z), x_e)
              + \sum_y w_y \, \mathrm{cross\ entropy}(\mathrm{head}_y(\hat z), y)
              + w \, |z - \hat z|^2 / D

    Gradients pass straight through the codes, from :math:`\hat z` to :math:`z`; mean and basis have
    gradients, too. The last term has a gradient of the latents only.

    Train it for some epochs with ``quantize=False``, call :meth:`fit`, which computes mean and
    basis from the latents, then train it further. Under ``DistributedDataParallel``, every rank
    calls :meth:`fit` of the wrapped module with its own batches.

    Args:
        embeddings: the width of each embedding, by name.
        labels: the number of classes of each label, by name; may be none.
        latent_dim: ``D``, of the latents.
        num_codes, num_levels: see :class:`DiscretePCA`.
        hidden_dim: of the one hidden layer of the encoder and of each decoder.
        losses: the loss of each embedding, by name: ``"cosine"``, one minus the cosine of the
            angle, or ``"mse"``. With ``"cosine"``, the default, the length of the embedding is
            ignored.
        weights: the weight of each loss, by name: one by default, and 0.25 for ``"commitment"``.
        device: of all parameters.

    Attributes:
        pca: the :class:`DiscretePCA` of the latents, which :class:`JaggedTargetAttention` takes as
            ``history_codes`` for the codes of :meth:`encode`.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: there is no embedding, a size is less than 1, a name is not known, or a loss has
            the name of another.

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
        multi-task VQ-VAE of content embeddings and categorical labels. How it works here is ours.
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
        weights: Mapping[str, float] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_device(device)
        labels = {} if labels is None else labels
        losses = {} if losses is None else losses
        weights = {} if weights is None else weights
        _check_sizes(embeddings, labels, latent_dim=latent_dim, hidden_dim=hidden_dim)
        names = {*embeddings, *labels, "commitment"}
        for argument, given, known in (
            ("losses", losses, {*embeddings}),
            ("weights", weights, names),
        ):
            if not isinstance(given, Mapping):
                raise TypeError(f"{argument} must be by name, got a {type(given).__name__}")
            if unknown := sorted(given.keys() - known):
                raise ValueError(f"{argument} must have keys of {sorted(known)}, got {unknown}")
        if wrong := [loss for loss in losses.values() if loss not in LOSSES]:
            raise ValueError(f"losses must be {' or '.join(LOSSES)}, got {wrong}")
        for name, weight in weights.items():
            check_real(weight, f"weights[{name!r}]")
        self.embeddings, self.labels = dict(embeddings), dict(labels)
        self.losses = {name: losses.get(name, "cosine") for name in embeddings}
        self.weights = dict.fromkeys(sorted(names), 1.0) | {"commitment": 0.25} | dict(weights)

        def layers(inner: int, outer: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(inner, hidden_dim, device=device),
                nn.ReLU(),
                nn.Linear(hidden_dim, outer, device=device),
            )

        self.encoder = layers(sum(embeddings.values()), latent_dim)
        self.pca = DiscretePCA(latent_dim, num_codes, num_levels, trainable=True, device=device)
        self.decoders = nn.ModuleList(layers(latent_dim, x) for x in embeddings.values())
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
        """Losses of a batch.

        Args:
            embeddings: ``[N, width]`` by name, of the dtype of the parameters. Losses of no row
                are zero.
            labels: ``[N]`` int64 classes, by name.
            quantize: whether latents go by way of their codes; else the decoders read them.

        Raises:
            TypeError: a dtype does not fit.
            ValueError: a name is missing or not known, or a shape or device does not fit; or (on
                CPU, or under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) a class is out of range, or
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
        reduction = "mean" if len(latents) else "sum"  # of no rows: zero, not NaN
        if quantize:
            codes = self.pca.encode(latents.detach())
            decoded = self.pca.decode(codes)
            losses["commitment"] = F.mse_loss(latents, decoded.detach(), reduction=reduction)
            decoded = decoded + (latents - latents.detach())
        else:  # zeros, so that all parameters have a gradient, as DistributedDataParallel expects
            decoded = decoded + 0 * (self.pca.mean.sum() + self.pca.basis.sum())
        for decoder, (name, loss) in zip(self.decoders, self.losses.items(), strict=True):
            made, given = decoder(decoded), embeddings[name]
            if loss == "cosine":
                distances = 1 - F.cosine_similarity(made, _unit(given))
                losses[name] = distances.mean() if len(latents) else distances.sum()
            else:
                losses[name] = F.mse_loss(made, given, reduction=reduction)
        for head, name in zip(self.heads, self.labels, strict=True):
            losses[name] = F.cross_entropy(head(decoded), labels[name], reduction=reduction)
        total = torch.stack([self.weights[name] * loss for name, loss in losses.items()]).sum()
        return Fused(total, losses, codes)

    @torch.no_grad()
    def fit(
        self,
        batches: Iterable[Mapping[str, Tensor]],
        *,
        tolerance: float = 1e-3,
        max_steps: int = 50,
        process_group: dist.ProcessGroup | None = None,
    ) -> list[float]:
        """Find mean and basis of the latents, by :meth:`DiscretePCA.fit`.

        Where a process group is initialized, every rank must call it, each with batches of its own.

        Args:
            batches: embeddings, as :meth:`forward` takes them. Their latents stay in memory.
            tolerance, max_steps, process_group: as there.

        Returns:
            As there.
        """
        if not isinstance(batches, Iterable) or isinstance(batches, Mapping):
            raise TypeError(
                f"batches must be batches of embeddings, got a {type(batches).__name__}"
            )
        latents = [self._latents(batch) for batch in batches]
        return self.pca.fit(
            latents, tolerance=tolerance, max_steps=max_steps, process_group=process_group
        )

    @torch.no_grad()
    def encode(self, embeddings: Mapping[str, Tensor]) -> Tensor:
        """Codes ``[N, L]`` int8 of rows, see :meth:`forward`."""
        return self.pca.encode(self._latents(embeddings))

    def _latents(self, embeddings: Mapping[str, Tensor]) -> Tensor:
        """``[N, D]``."""
        _check_names("embeddings", embeddings, self.embeddings)
        scaled, num_rows = [], None
        for name, width in self.embeddings.items():
            given = embeddings[name]
            check_shape(given, f"embeddings[{name!r}]", "[N, width]", (num_rows, width))
            check_same(self.pca.mean, "mean", dtype=True, **{f"embeddings[{name!r}]": given})
            num_rows = len(given)
            scaled.append(given)
            if self.losses[name] == "cosine":
                scaled[-1] = _unit(given) * width**0.5
        return self.encoder(torch.cat(scaled, 1))


def _unit(rows: Tensor) -> Tensor:
    """``rows`` of length one, of any scale; zeros stay."""
    largest = rows.abs().amax(1, keepdim=True)
    return F.normalize(rows / torch.where(largest > 0, largest, 1))


def _check_sizes(embeddings: Mapping[str, int], labels: Mapping[str, int], **dims: int) -> None:
    for argument, size in dims.items():
        check_int(size, argument, 1)
    for argument, sizes in (("embeddings", embeddings), ("labels", labels)):
        if not isinstance(sizes, Mapping):
            raise TypeError(f"{argument} must be sizes by name, got a {type(sizes).__name__}")
        for name, size in sizes.items():
            check_int(size, f"{argument}[{name!r}]", 1)
    if not embeddings:
        raise ValueError("embeddings must hold at least one width, got none")
    names = [*embeddings, *labels, "commitment"]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"embeddings and labels must have different names, none of them 'commitment', got "
            f"{repeated} more than once"
        )


def _check_names(argument: str, given: Mapping[str, Tensor], known: dict[str, int]) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument} must be tensors by name, got a {type(given).__name__}")
    if given.keys() != known.keys():
        raise ValueError(f"{argument} must have the names {sorted(known)}, got {sorted(given)}")
    for name, tensor in given.items():
        check_tensor(tensor, f"{argument}[{name!r}]")
