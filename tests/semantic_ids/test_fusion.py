"""``VQFusion`` learns joint codes of several embeddings and labels."""

import pytest
import torch
import torch.nn.functional as F

from tests.runs import assert_same_run
from torchrec_jagged_attn.semantic_ids import VQFusion

WIDTHS = {"text": 12, "image": 8}
CLASSES = {"kind": 4}


def make_fusion(device="cpu", **options):
    torch.manual_seed(0)
    sizes = {"latent_dim": 8, "num_codes": 20, "hidden_dim": 32}
    return VQFusion(WIDTHS, CLASSES, device=device, **sizes | options)


def make_rows(num_rows, device="cpu", seed=0):
    """Embeddings in four clusters, one per kind, with noise."""
    centers = torch.Generator().manual_seed(0)
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(CLASSES["kind"], (num_rows,), generator=generator)
    rows = {}
    for name, width in WIDTHS.items():
        means = 3 * torch.randn(CLASSES["kind"], width, generator=centers)
        rows[name] = (means[kinds] + torch.randn(num_rows, width, generator=generator)).to(device)
    return rows, {"kind": kinds.to(device)}


def train(fusion, steps, **options):
    optimizer = torch.optim.Adam(fusion.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        fusion(*make_rows(256, fusion.pca.mean.device, seed=step), **options).loss.backward()
        optimizer.step()


def test_training_reduces_losses_of_held_out_rows(device):
    """Losses of held-out rows fall during training without and with quantization."""
    fusion = make_fusion(device)
    others = make_rows(500, device, seed=10**6)
    untrained = fusion(*others, quantize=False).losses
    train(fusion, 100, quantize=False)
    fusion.fit([make_rows(256, device, seed=seed)[0] for seed in range(8)])
    fitted = fusion(*others).losses
    train(fusion, 100)
    trained = fusion(*others).losses
    for name in (*WIDTHS, *CLASSES):
        assert trained[name] < 0.7 * untrained[name], name
    assert sum(trained.values()) < sum(fitted.values())
    codes = fusion.encode(others[0])
    assert codes.dtype == torch.int8
    rows = fusion.pca.decode(codes)
    predicted = fusion.heads[0](rows).argmax(1)
    assert (predicted == others[1]["kind"]).float().mean() > 0.9


def test_gradients_pass_straight_through():
    """Latents get the gradient of the decoded rows plus the gradient of the commitment loss."""
    fusion = make_fusion()
    rows, labels = make_rows(50)
    fusion.fit([rows])
    latents = fusion._latents(rows).detach()
    codes = fusion.pca.encode(latents)
    decoded = fusion.pca.decode(codes).detach().requires_grad_()
    losses = [
        1 - F.cosine_similarity(decoder(decoded), rows[name]).mean()
        for name, decoder in zip(WIDTHS, fusion.decoders, strict=True)
    ]
    losses.append(F.cross_entropy(fusion.heads[0](decoded), labels["kind"]))
    (through,) = torch.autograd.grad(sum(losses), decoded)
    expected = through + 0.25 * 2 * (latents - decoded.detach()) / latents.numel()

    seen = []

    def watch(module, inputs, out):
        out.register_hook(seen.append)

    fusion.encoder.register_forward_hook(watch)
    fused = fusion(rows, labels)
    fused.loss.backward()
    assert torch.equal(fused.codes, codes)
    assert_same_run(seen[0], expected, num_terms=100)
    basis_grad = codes.float().T @ through
    assert_same_run(fusion.pca.basis.grad, basis_grad, num_terms=100)
    assert_same_run(fusion.pca.mean.grad, through.sum(0), num_terms=100)


def test_losses():
    rows, labels = make_rows(40)
    fusion = make_fusion(losses={"image": "mse"})
    fused = fusion(rows, labels, quantize=False)
    decoded = fusion.decoders[1](fusion._latents(rows))
    mse = F.mse_loss(decoded, rows["image"])
    assert_same_run(fused.losses["image"], mse, num_terms=100)
    assert_same_run(fused.loss, fused.losses["text"] + mse + fused.losses["kind"], num_terms=100)
    assert fused.codes is None
    longer = {"text": 3 * rows["text"], "image": rows["image"]}
    assert_same_run(fusion._latents(longer), fusion._latents(rows), num_terms=100)


def test_without_labels_and_without_rows():
    fusion = VQFusion({"text": 12}, latent_dim=4, num_codes=5)
    fusion.fit([{"text": torch.eye(12)}])
    assert fusion.encode({"text": torch.zeros(0, 12)}).shape == (0, 5)
    assert set(fusion({"text": torch.ones(3, 12)}).losses) == {"text", "commitment"}


@pytest.mark.parametrize("quantize", [True, False])
def test_losses_of_an_empty_batch_are_zero(quantize):
    fusion = make_fusion()
    fusion.fit([make_rows(60)[0]])
    fused = fusion(*make_rows(0), quantize=quantize)
    assert all(loss == 0 for loss in (fused.loss, *fused.losses.values()))
    fused.loss.backward()
    assert all(not weight.grad.any() for weight in fusion.parameters())


def test_state_dict():
    rows, _ = make_rows(60)
    fusion = make_fusion()
    fusion.fit([rows])
    other = VQFusion(WIDTHS, CLASSES, latent_dim=8, num_codes=20, hidden_dim=32)
    other.load_state_dict(fusion.state_dict())
    assert torch.equal(other.encode(rows), fusion.encode(rows))


def test_all_parameters_have_a_gradient_in_each_mode():
    """Gradients of mean and basis are zeros while latents are not quantized."""
    fusion = make_fusion()
    fusion(*make_rows(20), quantize=False).loss.backward()
    assert not any(parameter.grad is None for parameter in fusion.parameters())
    assert not fusion.pca.mean.grad.any()
    assert not fusion.pca.basis.grad.any()
    fusion.fit([make_rows(20)[0]])
    fusion.zero_grad()
    fusion(*make_rows(20)).loss.backward()
    assert not any(parameter.grad is None for parameter in fusion.parameters())


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_cosines_of_any_scale(factor):
    fusion = make_fusion()
    rows, labels = make_rows(20)
    scaled = {name: x * factor for name, x in rows.items()}
    fusion.fit([rows])
    assert torch.equal(fusion.encode(scaled), fusion.encode(rows))
    assert fusion(scaled, labels).loss == fusion(rows, labels).loss


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"embeddings": {}}, ValueError, "embeddings must hold at least one width, got none"),
        ({"embeddings": ["text"]}, TypeError, "embeddings must be sizes by name, got a list"),
        ({"labels": {"kind": 0}}, ValueError, r"labels\['kind'\] must be at least 1, got 0"),
        ({"labels": {"text": 3}}, ValueError, r"must have different names, .*, got \['text'\]"),
        ({"labels": {"commitment": 3}}, ValueError, r"none of them 'commitment', got \['commitm"),
        ({"losses": ["mse"]}, TypeError, "losses must be losses by name, got a list"),
        ({"losses": {"kind": "mse"}}, ValueError, r"losses must have keys .*, got \['kind'\]"),
        ({"losses": {"text": "l1"}}, ValueError, r"losses must be cosine or mse, got \['l1'\]"),
    ],
)
def test_wrong_options_are_named(change, error, message):
    options = {"embeddings": {"text": 12}, "labels": {"kind": 3}, "latent_dim": 4, "num_codes": 5}
    with pytest.raises(error, match=message):
        VQFusion(**(options | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (torch.zeros(2, 8), ValueError, r"must have shape \[N, width\] = \[3, 8\], got \[2, 8\]"),
        (torch.zeros(3, 8).half(), TypeError, "must be torch.float32 as mean is"),
    ],
)
def test_wrong_embeddings_are_named(change, error, message):
    rows, labels = make_rows(3)
    with pytest.raises(error, match=rf"embeddings\['image'\] {message}"):
        make_fusion()(rows | {"image": change}, labels)
    with pytest.raises(ValueError, match=r"names \['image', 'text'\], got \['text'\]"):
        make_fusion()({"text": rows["text"]}, labels)
    with pytest.raises(TypeError, match="embeddings must be tensors by name, got a Tensor"):
        make_fusion()(rows["text"], labels)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ({}, ValueError, r"labels must have the names \['kind'\], got \[\]"),
        ({"kind": torch.zeros(2).long()}, ValueError, r"must have shape \[N\] = \[3\], got \[2\]"),
        ({"kind": torch.zeros(3).int()}, TypeError, r"must be int64, got torch.int32"),
        ({"kind": torch.tensor([0, 4, 1])}, ValueError, "must be 0 to 3, got 0 to 4"),
    ],
)
def test_wrong_labels_are_named(labels, error, message):
    with pytest.raises(error, match=message):
        make_fusion()(make_rows(3)[0], labels)
