import copy
import io

import pytest
import torch
from torch import nn

from autoprec.optim.codecs import CODECS
from autoprec.optim.tensor import StoredTensor, decoded

WEIGHTS = [name for what, name in CODECS if what == "weights"]


def stored(name: str, shape=(6, 10), seed=0) -> StoredTensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return StoredTensor.store(values, CODECS["weights", name])


@pytest.mark.parametrize("name", WEIGHTS)
def test_it_looks_like_the_fp32_tensor_it_replaces(name):
    tensor = stored(name)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (torch.Size((6, 10)), torch.float32, "cpu")
    assert torch.equal(tensor * 1.0, tensor.decode())
    assert torch.equal(tensor.t() @ tensor, tensor.decode().t() @ tensor.decode())
    assert name.split("_")[0] in repr(tensor)


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_are_those_of_its_values(name):
    parameter = nn.Parameter(stored(name))
    plain = nn.Parameter(parameter.decode())
    x = torch.randn(3, 10)
    for weight in (parameter, plain):
        nn.functional.linear(x, weight).square().sum().backward()
    assert torch.equal(parameter.grad, plain.grad)
    assert isinstance(parameter, nn.Parameter)


@pytest.mark.parametrize("name", WEIGHTS)
def test_in_place_operations_reach_the_stored_values(name):
    tensor = stored(name)
    values = tensor.exact()
    assert tensor.mul_(2.0) is tensor
    torch.testing.assert_close(tensor.exact(), values * 2, rtol=2**-3, atol=1e-3)
    tensor.copy_(torch.ones(6, 10))
    assert torch.equal(tensor.decode(), torch.ones(6, 10))
    tensor.zero_()
    assert tensor.abs().sum() == 0
    torch._foreach_add_([tensor, torch.zeros(2)], 1.0)
    assert torch.equal(tensor.decode(), torch.ones(6, 10))


@pytest.mark.parametrize("name", WEIGHTS)
def test_other_data_is_taken_as_torch_takes_it(name):
    """SAM puts weights back with ``p.data = old``, averages are swapped in by it, vectors are read back by it."""
    parameter = nn.Parameter(stored(name))
    first, kept = parameter.data.clone(), parameter.data
    with torch.no_grad():
        parameter.data = torch.full((6, 10), 0.5)
    assert torch.equal(parameter.detach().clone(), torch.full((6, 10), 0.5))
    assert torch.equal(kept.clone(), first)  # other bytes, and not what was written into these
    parameter.data = kept
    assert torch.equal(parameter.detach().clone(), first)
    nn.utils.vector_to_parameters(torch.full((60,), 0.25), [parameter])
    assert isinstance(parameter, StoredTensor)
    assert torch.equal(parameter.detach().clone(), torch.full((6, 10), 0.25))
    with pytest.raises(RuntimeError, match="takes no data"):
        parameter.data = torch.zeros(5, 10)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_module_that_is_cast_keeps_the_exact_value(name):
    model = nn.Conv2d(6, 4, 3)
    model.weight = nn.Parameter(StoredTensor.store(model.weight.detach(), CODECS["weights", name]))
    exact = model.weight.exact()
    for change in (lambda: model.to(memory_format=torch.channels_last), model.bfloat16, model.half, model.float):
        change()
        assert isinstance(model.weight, StoredTensor)
        assert torch.equal(model.weight.exact(), exact)
        assert model.weight.dtype == model.bias.dtype
        x = torch.ones(1, 6, 3, 3, dtype=model.weight.dtype)
        assert torch.equal(model.weight * 1, model.weight.decode().to(model.weight.dtype))
        model(x).sum().backward()
        assert model.weight.grad.dtype == model.weight.dtype
        model.zero_grad()


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_part_is_written_by_its_index(name):
    parameter = nn.Parameter(stored(name))
    rest = parameter.detach().clone()[1:]
    with torch.no_grad():
        parameter[0] = 0
    parameter.data[:, 3] = 0.5
    values = parameter.detach().clone()
    assert not values[0, [0, 1, 2, 4]].any()
    assert (values[:, 3] == 0.5).all()
    assert torch.allclose(values[1:, :3], rest[:, :3], atol=1e-3)
    with pytest.raises(RuntimeError, match="leaf"):
        parameter[0] = 0


@pytest.mark.parametrize("name", WEIGHTS)
def test_it_may_be_what_an_operation_writes_its_result_to(name):
    """``nn.init.eye_`` does, and what projects weights in place."""
    parameter = nn.Parameter(stored(name))
    nn.init.eye_(parameter)
    assert torch.equal(parameter.detach().clone(), torch.eye(*parameter.shape))
    with torch.no_grad():
        returned = torch.mul(parameter, 2.0, out=parameter)
    assert returned is parameter
    assert torch.equal(parameter.detach().clone(), 2 * torch.eye(*parameter.shape))


def test_detach_shares_and_clone_does_not():
    tensor = stored("bf16_kahan")
    alias, own = tensor.detach(), tensor.clone()
    tensor.zero_()
    assert alias.abs().sum() == 0
    assert own.abs().sum() > 0
    assert alias.parts[0].data_ptr() == tensor.parts[0].data_ptr()


@pytest.mark.parametrize("name", ["bf16_stochastic", "bf16_kahan"])
def test_casting_to_the_stored_dtype_costs_nothing(name):
    tensor = stored(name)
    assert tensor.bfloat16().data_ptr() == tensor.parts[0].data_ptr()
    assert tensor.half().dtype == torch.float16


@pytest.mark.parametrize("name", WEIGHTS)
def test_files_hold_plain_tensors_with_the_exact_value(name):
    tensor, file = stored(name), io.BytesIO()
    torch.save({"w": tensor, "p": nn.Parameter(tensor)}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert type(found["w"]) is torch.Tensor
    assert type(found["p"]) is nn.Parameter
    assert torch.equal(found["w"], tensor.exact())


@pytest.mark.parametrize("name", WEIGHTS)
def test_copying_between_stored_tensors_keeps_the_exact_value(name):
    source, target = stored(name), stored(name, seed=1)
    target.copy_(source)
    assert torch.equal(target.exact(), source.exact())
    plain = torch.zeros(6, 10)
    plain.copy_(source)
    assert torch.equal(plain, source.exact())


COPIES = {
    "model": lambda layer: copy.deepcopy(layer).weight,
    "state_dict": lambda layer: copy.deepcopy(layer.state_dict())["weight"],
    "clone": lambda layer: layer.weight.detach().clone(),
    "data": lambda layer: layer.weight.data.clone(),
    "average": lambda layer: torch.optim.swa_utils.AveragedModel(layer).module.weight,
}
AVERAGES = {
    "lerp": lambda average, weight: average.lerp_(weight, 0.01),
    "add": lambda average, weight: average.mul_(0.99).add_(weight, alpha=0.01),
    "foreach": lambda average, weight: torch._foreach_lerp_([average], [weight], 0.01),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_plain_and_averages_in_them_are_those_of_exact_weights(name, how):
    layer = nn.Linear(10, 6)
    layer.weight = nn.Parameter(stored(name))
    made = COPIES[how](layer)
    assert type(made) in (torch.Tensor, nn.Parameter)
    assert torch.equal(made, layer.weight.exact())
    with torch.no_grad():
        layer.weight.add_(0.01)
        for step in AVERAGES.values():
            expected, average = made.detach().clone(), made.detach().clone()
            for _ in range(20):
                step(average, layer.weight)
                step(expected, layer.weight.exact())
            assert torch.equal(average, expected)


def test_in_place_operations_see_the_exact_value():
    tensor = stored("bf16_kahan")
    plain = tensor.exact()
    for _ in range(50):  # a decay by hand: each step is far below half a unit of BF16
        tensor.mul_(1 - 1e-4)
        plain.mul_(1 - 1e-4)
    torch.testing.assert_close(tensor.exact(), plain, rtol=2e-4, atol=0)


def test_bytes_are_those_of_the_parts():
    held = {name: sum(part.nbytes for part in stored(name).parts) for name in ("bf16_kahan", "e4m3_master")}
    assert held == {"bf16_kahan": 6 * 10 * 4, "e4m3_master": 60 * 3 + 8}


def test_decoded_leaves_everything_else_alone():
    assert decoded(3) == 3
    plain = torch.ones(2)
    assert decoded(plain) is plain


def test_autocast_uses_the_stored_bits():
    layer = nn.Linear(10, 6, bias=False)
    layer.weight = nn.Parameter(stored("bf16_stochastic"))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.ones(2, 10))
    assert out.dtype == torch.bfloat16
    expected = nn.functional.linear(torch.ones(2, 10).bfloat16(), layer.weight.parts[0])
    assert torch.equal(out, expected)


def test_it_passes_through_compile():
    layer = nn.Linear(10, 6)
    layer.weight = nn.Parameter(stored("bf16_stochastic"))
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(3, 10)
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_reads_bytes_gets_what_a_checkpoint_holds(name, tmp_path):
    """TensorBoard's histograms, NumPy, and safetensors, in which Hugging Face's Trainer saves by default."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Linear(10, 6)
    model.weight = nn.Parameter(stored(name))
    exact = model.weight.exact()
    assert torch.equal(torch.from_numpy(model.weight.detach().numpy()), exact)
    assert model.weight.tolist() == exact.tolist()
    with pytest.raises(RuntimeError, match="requires grad"):
        model.weight.numpy()
    safetensors.save_file(model.state_dict(), tmp_path / "w.safetensors")
    safetensors.save_model(model, tmp_path / "m.safetensors")
    for file in ("w.safetensors", "m.safetensors"):
        assert torch.equal(safetensors.load_file(tmp_path / file)["weight"], exact)
    entry = model.state_dict()["weight"]
    held = entry.data_ptr()
    model.weight.data.zero_()
    assert entry.data_ptr() == held
    assert entry.untyped_storage().data_ptr() == held
    assert "_held" not in model.weight.__dict__
    with pytest.raises(RuntimeError, match="shared memory"):
        model.share_memory()
