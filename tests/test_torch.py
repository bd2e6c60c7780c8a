"""PyTorch modules as JAX functions: forward, gradient and Hessian-vector product as PyTorch has them."""

import math
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilax

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'bilax[torch]'")
nn, F = torch.nn, torch.nn.functional


def convnet(channels=3, filters=4):
    blocks = [
        layer
        for i in range(4)
        for layer in (
            nn.Conv2d(filters if i else channels, filters, 3, padding=1),
            nn.BatchNorm2d(filters),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(filters, 3))


class Basic(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, channels, filters, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(filters), nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.short_cut = nn.Sequential()
        if stride != 1 or channels != filters:
            self.short_cut = nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.short_cut(x)
        return F.relu(out)


def resnet18(width=2):
    widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
    blocks, channels = [], width
    for i, filters in enumerate(widths):
        blocks.append(Basic(channels, filters, 2 if i in (2, 4, 6) else 1))
        channels = filters
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(channels, 3))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.net, self.head = kind(3, 4, 2, batch_first=True, **options), nn.LazyLinear(2)

    def forward(self, x):
        return self.head(self.net(x)[0][:, -1])


class Everything(nn.Module):
    """What people write in a forward pass."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.groups = nn.Embedding(7, 6, padding_idx=0), nn.LayerNorm(6), nn.GroupNorm(2, 6)
        self.conv, self.up = nn.Conv1d(6, 6, 3, groups=3, padding="same"), nn.ConvTranspose1d(6, 4, 4, 2, 1, groups=2)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("position", torch.linspace(0, 1, 6))

    def forward(self, tokens, mask):
        x = self.norm(self.embed(tokens) + self.position) * self.scale.exp()
        x = x.masked_fill(mask[..., None], 0.5)
        x[:, 0] = 0.1
        x = x.clamp(-1.5, 1.5)
        q, k, v = x.repeat(1, 1, 3).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k.roll(1, 1), v.flip(1), is_causal=True)
        x = self.groups(F.gelu(self.conv(x.transpose(1, 2))))
        x = F.silu(F.avg_pool1d(self.up(F.pad(x, (1, 2))), 3, 2, 1)).softmax(-1)
        x = torch.einsum("bcl,bdl->bcd", x, x.detach().cumsum(1)).flatten(1)  # no ties
        best, _ = torch.cat([x, x.square().cumsum(-1).tril()], -1).topk(9, dim=-1)
        parts = [best.mean(-1), best.std(-1), best.norm(dim=-1), best.logsumexp(-1), F.elu(best - 1).amax(-1)]
        return torch.stack(parts, -1) + F.adaptive_avg_pool1d(best, 5) + F.leaky_relu(best.max(-1).values - 2)[:, None]


def pictures(n=6, side=16):
    return (torch.randn(n, 3, side, side),)


def words(n=5, length=6, width=3):
    return (torch.randn(n, length, width),)


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: (torch.randn(5, 4),)),
    "convnet-4, statistics of the batch": (convnet, pictures),
    "convnet-4, stored statistics": (lambda: convnet().eval(), pictures),
    "resnet-18, statistics of the batch": (resnet18, lambda: pictures(side=32)),
    "resnet-18, stored statistics": (lambda: resnet18().eval(), lambda: pictures(side=32)),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True), words),
    "lstm": (lambda: Recurrent(nn.LSTM), words),
    "rnn": (lambda: Recurrent(nn.RNN, bias=False), words),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation="gelu").eval(),
        lambda: words(width=4),
    ),
    "transformer in training, no dropout": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0, norm_first=True),
        lambda: words(width=4),
    ),
    "everything": (Everything, lambda: (torch.arange(20).reshape(4, 5) % 7, torch.arange(20).reshape(4, 5) % 5 == 3)),
}


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def loss_weights(shape):
    return np.cos(np.arange(np.prod(shape))).reshape(shape)


def as_torch_has_it(module, inputs, direction):
    """Output, gradient and Hessian-vector product of a loss Σ c · tanh(output)."""
    names, values = zip(*module.named_parameters(), strict=True)

    def loss(*values):
        out = torch.func.functional_call(module, dict(zip(names, values, strict=True)), inputs)
        return (torch.tensor(loss_weights(out.shape)) * torch.tanh(out)).sum(), out

    # Fused attention has no second derivative in PyTorch.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        value, out = loss(*values)
    grad = torch.autograd.grad(value, values, create_graph=True)
    product = torch.autograd.grad(grad, values, [torch.tensor(direction[name]) for name in names], allow_unused=True)
    product = [torch.zeros_like(v) if p is None else p for p, v in zip(product, values, strict=True)]
    return out, dict(zip(names, grad, strict=True)), dict(zip(names, product, strict=True))


def as_we_have_it(apply, parameters, inputs, direction):
    def loss(parameters):
        out = apply(parameters, *inputs)
        return jnp.sum(loss_weights(out.shape) * jnp.tanh(out)), out

    def both(parameters):
        slope = jax.grad(lambda p: loss(p)[0])
        return loss(parameters)[1], *jax.jvp(slope, (parameters,), (direction,))

    return jax.jit(both)(parameters)


def leaves_of(tensors):
    return [tensor.detach().numpy() for tensor in jax.tree.leaves(tensors)]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"kernel_size": 2}, (3, 2, 5, 6)),
        ({"kernel_size": (3, 1)}, (2, 7, 4)),
        ({"kernel_size": 5}, (2, 1, 11, 10)),
        ({"kernel_size": 3, "stride": 2, "padding": 1}, (2, 2, 7, 7)),
        ({"kernel_size": 2, "ceil_mode": True}, (2, 2, 5, 5)),
    ],
    ids=str,
)
def test_pooling_by_the_largest_is_that_of_pytorch_also_of_nan(options, shape):
    module, x = nn.MaxPool2d(**options), torch.randn(*shape)
    x.view(-1)[7] = math.nan
    apply, parameters = bilax.from_torch(module)
    np.testing.assert_array_equal(apply(parameters, jnp.asarray(x.numpy())), module(x))
    x = torch.randn(*shape, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.sin(module(x)).sum(), x)
    found = jax.grad(lambda x: jnp.sum(jnp.sin(apply(parameters, x))))(jnp.asarray(x.detach().numpy()))
    np.testing.assert_allclose(found, slope, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_output_gradient_and_hessian_vector_product_are_those_of_pytorch(name):
    make, draw = CASES[name]
    module, inputs = make(), draw()
    module(*inputs)  # batch norm has statistics to store, lazy layers know their size
    apply, parameters = bilax.from_torch(module)
    random = np.random.default_rng(0)
    direction = {name: random.normal(size=np.shape(value)) for name, value in parameters.items()}
    ours = as_we_have_it(apply, parameters, [one.numpy() for one in inputs], direction)
    theirs = as_torch_has_it(module, inputs, direction)
    for mine, their in zip(jax.tree.leaves(ours), leaves_of(theirs), strict=True):
        np.testing.assert_allclose(mine, their, rtol=1e-8, atol=1e-9)


def test_a_solution_goes_back_into_the_module():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    module[0].bias.requires_grad_(False)
    apply, parameters = bilax.from_torch(module)
    assert set(parameters) == {"0.weight", "1.weight", "1.bias"}
    twice = jax.tree.map(lambda leaf: 2 * leaf, parameters)
    x = np.ones((4, 2))
    assert bilax.to_torch(twice, module) is module
    np.testing.assert_allclose(apply(twice, x), module(torch.tensor(x)).detach().numpy(), rtol=1e-12)
    with pytest.raises(ValueError, match=r"0.weight.*\(2,\).*\(3, 2\)"):
        bilax.to_torch(twice | {"0.weight": np.ones(2)}, module)
    with pytest.raises(ValueError, match=r"'1.bias'.*got \['1.weight'\]"):
        bilax.to_torch({"1.weight": 0.0}, module)


def test_a_tensor_under_two_names_is_one_parameter():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    module[2].weight = module[0].weight
    apply, parameters = bilax.from_torch(module)
    assert list(parameters) == ["0.weight"]
    half, x = {"0.weight": parameters["0.weight"] / 2}, np.ones((1, 3))
    expected = np.tanh(x @ half["0.weight"].T) @ half["0.weight"].T
    np.testing.assert_allclose(apply(half, x), expected, rtol=1e-12)


def test_the_function_is_of_the_module_as_it_was():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)).eval()
    apply, parameters = bilax.from_torch(module)
    x = np.eye(2)
    before = np.asarray(apply(parameters, x))
    module.train()(torch.randn(9, 2))
    with torch.no_grad():
        module[0].weight.zero_()
    np.testing.assert_array_equal(apply(parameters, x), before)


def test_dropout_needs_a_key_and_uses_it():
    apply, parameters = bilax.from_torch(nn.Sequential(nn.Identity(), nn.Dropout(0.25)))
    x = np.ones((4000,))
    with pytest.raises(ValueError, match=r"key=jax\.random\.key"):
        apply(parameters, x)
    first, again, other = (np.asarray(apply(parameters, x, key=jax.random.key(i))) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert set(np.unique(first.round(6))) == {0.0, np.round(4 / 3, 6)}
    assert abs(np.mean(first == 0) - 0.25) < 0.03


def test_it_computes_in_the_precision_of_the_parameters():
    apply, parameters = bilax.from_torch(convnet().float().eval())
    x = np.random.default_rng(0).normal(size=(2, 3, 16, 16))
    assert apply(parameters, x.astype(np.float32)).dtype == np.float32
    doubles = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), parameters)
    np.testing.assert_allclose(
        apply(doubles, x), bilax.from_torch(convnet_of(doubles))[0](doubles, x), rtol=1e-10, atol=1e-10
    )


def convnet_of(parameters):
    return bilax.to_torch(parameters, convnet().double().eval())


class Unblessed(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(3, 3)), forward

    def forward(self, x):
        return self.function(x @ self.weight)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, slope):
        return slope


def without_slope(x):
    with torch.no_grad():
        return x * 2


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (torch.linalg.det, "linalg_det"),
        (lambda x: torch.fft.rfft(x).real, "fft_r2c"),
        (Straight.apply, "autograd.Function"),
        (without_slope, "no_grad.*detach"),
    ],
    ids=["determinant", "fft", "own backward", "no_grad"],
)
def test_what_cannot_be_converted_is_named(function, said):
    apply, parameters = bilax.from_torch(Unblessed(function))
    with pytest.raises(NotImplementedError, match=said):
        apply(parameters, np.eye(3))


def test_what_pytorch_cannot_follow_or_is_no_module_is_told():
    apply, parameters = bilax.from_torch(Unblessed(lambda x: x if x.sum() > 0 else -x))
    with pytest.raises(ValueError, match=r"torch.export cannot follow Unblessed"):
        apply(parameters, np.eye(3))
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module"):
        bilax.from_torch(len)


def test_a_data_loader_and_a_module_go_into_solve():
    x, wanted = torch.randn(64, 3), torch.tensor([1.0, -2.0, 0.5])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x @ wanted)[:, None]), batch_size=32)
    module = nn.Linear(3, 1)
    apply, parameters = bilax.from_torch(module)

    def lower(scale, y, inputs, targets):
        return jnp.mean((apply(y, inputs) - scale * targets) ** 2)

    problem = bilax.Problem(lambda scale, y, *data: lower(2.0, y, *data), lower)
    epochs = [batch for _ in range(60) for batch in loader]
    method = bilax.rhg(20, 0.1, start="warm")
    solution = bilax.solve(problem, method, 1.0, parameters, data=epochs, steps=120, optimizer=optax.adam(0.05))
    np.testing.assert_allclose(solution.x, 2.0, atol=1e-2)
    bilax.to_torch(solution.y, module)
    np.testing.assert_allclose(module.weight.detach().numpy()[0], 2 * wanted.numpy(), atol=0.05)
    bilax.solve(problem, method, 1.0, parameters, data=loader, steps=2)  # as it is


def test_without_pytorch_the_sentence_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None; import bilax\n"
        "try: bilax.from_torch(None)\nexcept ImportError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'bilax[torch]'" in said


def test_the_example_finds_wrong_labels_with_a_users_module():
    torch.set_default_dtype(torch.float32)
    names = runpy.run_path(str(Path(__file__).parent.parent / "docs/examples/clean_with_torch.py"))
    said = names["said"]
    assert said[:300].mean() > 0.9
    assert said[300:].mean() < 0.12
    assert names["accuracy"] > 0.88
