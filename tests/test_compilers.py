"""torch.compile, torch.export and torch.jit.trace: the same results as eager, in one graph. A run of test_train.py
compiles to machine code."""

import pytest
import torch
from helpers import assert_close, assert_same_gradients, make_batch, make_model, mini_config, objective


def mini(output_dict: bool):
    model = make_model("PCMEpp-tiny", output_dict=output_dict, **mini_config())
    text = torch.randint(1, 60, (3, 8))
    text[:, 5] = 63
    return model, (torch.randn(3, 3, 8, 8), text)


def named(out) -> dict:
    return out if isinstance(out, dict) else dict(enumerate(out))


def run(model, function, batch):
    out = named(function(*batch))
    model.zero_grad()
    total = objective({str(key): value for key, value in out.items()})
    total.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


@pytest.mark.parametrize("output_dict, checkpointing", [(True, True), (False, False)])
def test_compile_full_graph(output_dict, checkpointing):
    model, batch = mini(output_dict)
    model.set_grad_checkpointing(checkpointing)
    eager = run(model, model, batch)
    compiled = run(model, torch.compile(model, fullgraph=True, backend="aot_eager"), batch)
    assert_close(compiled[0], eager[0], tolerance=2e-6)
    assert_same_gradients(compiled[1], eager[1], tolerance=2e-5)


def test_compile_takes_cut_texts_of_changing_length():
    model, (image, text) = mini(output_dict=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for length in (8, 6):
            assert_close(compiled(image, text[:, :length]), model(image, text[:, :length]), tolerance=2e-6)


def test_export_for_any_batch_size(tmp_path):
    model, batch = mini(output_dict=True)
    size = torch.export.Dim("N", min=2, max=64)
    program = torch.export.export(model.eval(), batch, dynamic_shapes=({0: size}, {0: size}))
    torch.export.save(program, tmp_path / "model.pt2")
    larger = tuple(torch.cat([part, part.flip(0), part]) for part in batch)
    with torch.no_grad():
        assert_close(
            named(torch.export.load(tmp_path / "model.pt2").module()(*larger)), named(model(*larger)), tolerance=2e-6
        )


@pytest.mark.parametrize("output_dict", [True, False])
def test_trace(output_dict):
    model = make_model("PCMEpp-tiny", output_dict=output_dict).eval()
    batch, other = make_batch(model), make_batch(model, seed=7)
    with torch.no_grad():
        traced = torch.jit.trace(model, batch, strict=False)
        assert_close(named(traced(*other)), named(model(*other)), tolerance=2e-6)
