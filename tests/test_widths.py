"""Every width that models have, in every dtype: right to rounding, and the same bits whatever else is in the batch.

On a GPU all of them; on the CPU, where the promise is the same, the narrow ones.
"""

from __future__ import annotations

import pytest
import torch
from norm_cases import GPU, WIDTHS, assert_right, draw, equal, gradients, inputs, name_of, poisoned, seed

from meshnorm import rms_norm

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ON_CPU = (128, 1000, 2880, 4097)


def _everywhere(widths: tuple[int, ...]) -> list:
    on_gpu = [pytest.param("cuda", n, marks=GPU, id=f"cuda-{n}") for n in widths]
    return [pytest.param("cpu", n, id=f"cpu-{n}") for n in ON_CPU] + on_gpu


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest):
    seed(request)
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # tests run beside one another


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=name_of)
@pytest.mark.parametrize(("device", "n"), _everywhere((*WIDTHS, 262144)))
def test_a_width_is_right_with_any_number_of_rows(device: str, n: int, dtype: torch.dtype) -> None:
    for m in (1, 7, 199, 4096 if device == "cuda" else 401):
        given = inputs(m, n, dtype, device)
        with poisoned():
            found = gradients(*given)
        assert_right(given, found)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
@pytest.mark.parametrize(("device", "n"), _everywhere(WIDTHS))
def test_bits_depend_on_the_row_alone_and_are_the_same_each_time(device: str, n: int, dtype: torch.dtype) -> None:
    """Of rows taken at random, alone or many, in another order and place, y and dX have the bits of the whole batch's;
    the whole batch again has all of its bits again, dW too."""
    m = 1003 if device == "cuda" else 203
    x, weight, dy = inputs(m, n, dtype, device)
    whole = gradients(x, weight, dy)
    for _ in range(2):
        assert equal(gradients(x, weight, dy), whole)
    for count in (1, 2, 33, 500 if device == "cuda" else 100):
        chosen = torch.randperm(m, device=device)[:count]
        y, dx, _ = gradients(x[chosen], weight, dy[chosen])
        assert torch.equal(y, whole[0][chosen]), f"y of {count} rows"
        assert torch.equal(dx, whole[1][chosen]), f"dX of {count} rows"


@pytest.mark.parametrize(
    ("device", "n"), [("cpu", 96), *(pytest.param("cuda", n, marks=GPU) for n in (96, 4096, 70000))]
)
def test_eps_and_offset_are_exact_under_compile(device: str, n: int) -> None:
    """x² is about 1e-12, as eps is: an eps rounded to bf16 (off by 0.2%) or to fp16 (0) shows, and so does an offset of
    1 + 2⁻¹² rounded to either."""
    eps, offset = 1e-12, 1 + 2.0**-12
    x, dy = draw(7, n, dtype=F32, device=device) * 1e-6, draw(7, n, dtype=F32, device=device)
    weight = draw(n, dtype=BF16, device=device) * 2**-12
    options = {"casting_mode": "gemma", "eps": eps, "offset": offset}
    eager = gradients(x, weight, dy, **options)
    assert_right((x, weight, dy), eager, eps, offset)
    for rounded in ({"eps": torch.tensor(eps).bfloat16().item()}, {"eps": 0.0}, {"offset": 1.0}):
        y, _, _ = gradients(x, weight, dy, **options | rounded)
        assert not torch.equal(y, eager[0]), f"{rounded} makes no difference here"
    torch._dynamo.reset()
    compiled = torch.compile(rms_norm, backend="inductor" if device == "cuda" else "aot_eager", fullgraph=True)
    assert equal(gradients(x, weight, dy, compiled, **options), eager)
