"""Libraries' code goes back to the system; what runs again returns, and nothing else changes."""

import ctypes
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from daf._native import allocator as native

from daf.budget import limits
from daf.memory import process_memory
from daf.memory.domain import ProcessMemory
from daf.memory.owners import owners
from daf.memory.process_limit import CODE_BYTES, MemoryKeeper
from daf.memory.recycling_allocator import beside_account, unsupported_reason
from daf.profiling.beside_memory import BesideMemory

pytestmark = pytest.mark.skipif(bool(unsupported_reason()), reason=str(unsupported_reason()))
MB = 1_000_000

NETWORK = """
    import sys, torch
    from daf import Session
    from daf.memory import process_memory

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(16 * 14 * 14, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters())
"""

TRAINING = """
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8)
    mapped, losses = [], []
    for index in range(6):
        if index == 3 and sys.argv[1] == "drop":
            before = process_memory.mapped_bytes()
            process_memory.drop_code()
            mapped = [before, process_memory.mapped_bytes()]
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    print(*mapped, process_memory.mapped_bytes(), ",".join(losses))
"""

WITHIN_A_BUDGET = """
    batch = torch.randn(32, 3, 16, 16), torch.arange(32) % 10

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    for _ in range(2):
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    held_bytes = process_memory.resident_bytes()
    with Session(model, optimizer, held_bytes - 10_000_000, cache=False) as session:
        losses = [session.step(batch, loss_fn).loss for _ in range(6)]
        assert min(losses) < losses[0]
        print(held_bytes, session.peak_bytes, session.budget_bytes)
"""

PREPARED = """
    batch = torch.randn(256, 3, 16, 16), torch.arange(256) % 10

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def solver_bytes():
        kilobytes, is_solver = 0, False
        for line in open("/proc/self/smaps"):
            fields = line.split()
            if "-" in fields[0] and not fields[0].endswith(":"):
                is_solver = "highspy" in fields[-1]
            elif is_solver and fields[0] == "Rss:":
                kilobytes += int(fields[1])
        return 1024 * kilobytes

    held_bytes = process_memory.resident_bytes()
    with Session(model, optimizer, held_bytes + 2_000_000, cache=False) as session:
        session.prepare(batch, loss_fn)
        print(session.plan.policy.name, solver_bytes())
"""


def run(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", textwrap.dedent(NETWORK + code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_steps_read_again_what_they_run_and_train_on_as_before() -> None:
    before, dropped, after, losses = run(TRAINING, "drop")
    assert int(dropped) < int(before) - 50 * MB
    assert int(dropped) < int(after) < int(before) - 20 * MB
    assert losses == run(TRAINING, "keep")[-1]


def test_a_session_trains_in_less_than_the_process_held_before_it() -> None:
    held, peak, budget = map(int, run(WITHIN_A_BUDGET))
    assert peak <= budget < held


def test_the_solvers_code_does_not_stay_for_steps() -> None:
    policy, solver = run(PREPARED)
    assert policy == "optimal"
    assert 0 < int(solver) < MB


def test_pages_that_the_linker_has_written_into_stay(tmp_path: Path) -> None:
    """A library whose code holds addresses that are its own only since it was loaded."""
    source, library = tmp_path / "written.c", tmp_path / "written.so"
    source.write_text(
        "int far_away = 7;\n"
        '__asm__(".text\\n.balign 4096\\nheld: .quad far_away\\n.balign 4096\\n");\n'
        "extern int* const held;\n"
        "long address(void) { return (long)*(int* const volatile*)&held; }\n"
    )
    command = ["gcc", "-shared", "-fPIC", "-Wl,-z,notext", "-o", str(library), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0:
        pytest.skip(f"this linker makes no such library: {built.stderr[-200:]}")
    address = ctypes.CDLL(str(library)).address
    address.restype = ctypes.c_long
    first = address()
    assert ctypes.c_int.from_address(first).value == 7
    native.drop_library_pages()
    assert address() == first


def test_pages_that_a_debugger_has_written_into_stay(tmp_path: Path) -> None:
    """Written as breakpoints are: past the pages' protection, in this process alone."""
    source, library = tmp_path / "plain.c", tmp_path / "plain.so"
    source.write_text('const char text[] = "as built";\n')
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    text = (ctypes.c_char * 9).in_dll(ctypes.CDLL(str(library)), "text")
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(ctypes.addressof(text))
        memory.write(b"debugged")
    native.drop_library_pages()
    assert text.value == b"debugged"


def test_room_is_left_for_code_until_a_step_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = {"bytes": 100 * MB}
    monkeypatch.setattr(process_memory, "mapped_bytes", lambda: mapped["bytes"])
    monkeypatch.setattr(process_memory, "taken_bytes", lambda: 200 * MB + mapped["bytes"])
    monkeypatch.setattr(process_memory, "drop_code", lambda: mapped.update(bytes=5 * MB))
    held_bytes = native.statistics()["held_bytes.current"]
    keeper = MemoryKeeper()
    try:
        assert beside_account() == 300 * MB - held_bytes
        keeper.drop_code()
        assert keeper.code_bytes == CODE_BYTES
        assert beside_account() == 200 * MB + CODE_BYTES - held_bytes
        mapped["bytes"] = 70 * MB  # more than was expected
        assert beside_account() == 270 * MB - held_bytes
        mapped["bytes"] = 33 * MB
        keeper.code_returned()
        assert beside_account() == 233 * MB - held_bytes
    finally:
        keeper.close()
        assert owners.awaited_code_bytes == 0


def test_the_process_counts_with_the_most_code_that_steps_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapped = {"bytes": 100 * MB}
    monkeypatch.setattr(process_memory, "drop_code", lambda: mapped.update(bytes=5 * MB))

    class Memory(ProcessMemory):
        def mapped_bytes(self) -> int:  # type: ignore[override]
            return mapped["bytes"]

        def held_bytes(self) -> int:  # type: ignore[override]
            return 200 * MB + mapped["bytes"]

        def account_bytes(self) -> int:
            return 30 * MB

    keeper = MemoryKeeper()
    keeper.open()
    try:
        beside = BesideMemory(Memory(), keeper)
        assert beside.resident_bytes() == 300 * MB
        beside.drop_code()
        assert beside.resident_bytes() == 200 * MB + keeper.code_bytes
        mapped["bytes"] = 80 * MB
        beside.note()
        mapped["bytes"] = 20 * MB  # the system took some
        assert beside.resident_bytes() == 280 * MB
        beside.note()
        assert beside.resident_bytes() == 280 * MB
        keeper.least_code_bytes = limits.CACHED_CODE_BYTES
        beside.drop_code()
        assert beside.resident_bytes() == 200 * MB + limits.CACHED_CODE_BYTES
    finally:
        keeper.close()
