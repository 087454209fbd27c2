"""The memory that Linux leaves, read from trees of files as Linux writes them."""

import pytest

from common.memory import GIB, Need, Room, find_room, refuse_excess
from tests.harness.refusals import expect_refusal

MEMINFO = "MemTotal:       25165824 kB\nMemFree:         1000 kB\nMemAvailable:   {} kB\n"
STATUS = "Name:\tpython\nVmHWM:\t 2097152 kB\nVmRSS:\t 1048576 kB\nThreads:\t4\n"
STAT = "anon 1\nfile 9\ninactive_file {0}\nactive_file {0}\nslab 7\n"
V2 = "sys/fs/cgroup/"
V1 = "sys/fs/cgroup/memory/"


def write_tree(root, groups, **files):
    """Writes /proc of a process that holds 1 GiB where 16 GiB are available, and `files`: a path
    below /sys/fs/cgroup with _ for / -> GiB, or text."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO.format(16 * 2**20))
    (root / "proc/self/status").write_text(STATUS)
    (root / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else f"{int(content * GIB)}\n")


NESTED = {
    f"{V2}pod/memory.max": 6,
    f"{V2}pod/memory.current": 5,
    f"{V2}pod/memory.stat": STAT.format(GIB),  # 2 GiB of the 5 are cached files
    f"{V2}pod/box/memory.max": "max\n",
    f"{V2}pod/box/memory.high": 8,
    f"{V2}pod/box/memory.current": 2,
}
VERSION_1 = {
    f"{V1}memory.limit_in_bytes": "9223372036854771712\n",
    f"{V1}memory.usage_in_bytes": 9,
    f"{V1}slurm/memory.limit_in_bytes": 5,
    f"{V1}slurm/memory.usage_in_bytes": 3,
    f"{V1}slurm/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
}
CONTAINER = {f"{V1}memory.limit_in_bytes": 4, f"{V1}memory.usage_in_bytes": 2}
GROUP = "4:memory:/slurm\n1:cpu:/slurm\n0::/\n"
TREES = [
    ("0::/pod/box\n", NESTED, "", "pod/memory.max", 3),
    ("0::/pod/box\n", NESTED | {f"{V2}pod/memory.max": 60}, "", "pod/box/memory.high", 6),
    (GROUP, VERSION_1, "", "slurm/memory.limit_in_bytes", 3),
    # A container sees its own group as the root, under the host's path.
    ("4:memory:/docker/0123\n", CONTAINER, "", "memory/memory.limit_in_bytes", 2),
    # SLURM's limit is that of the job, so this process's memory counts; 0 is all of the node's.
    ("0::/\n", {}, "MEM_PER_NODE=0", "MemAvailable", 16),
    ("0::/\n", {}, "MEM_PER_NODE=4096", "SLURM_MEM_PER_NODE", 3),
    ("0::/\n", {}, "MEM_PER_CPU=2048 CPUS_ON_NODE=4", "SLURM_MEM_PER_CPU", 7),
    ("0::/\n", {}, "MEM_PER_GPU=3072 GPUS_ON_NODE=2", "SLURM_MEM_PER_GPU", 5),
]


@pytest.mark.parametrize(("groups", "files", "slurm", "limit", "free"), TREES)
def test_the_tightest_limit_counts(groups, files, slurm, limit, free, tmp_path, monkeypatch):
    write_tree(tmp_path, groups, **files)
    for word in slurm.split():
        monkeypatch.setenv(*f"SLURM_{word}".split("="))
    room = find_room(root=tmp_path)
    assert room.limit.endswith(limit)
    assert (room.size, room.held) == ((free + 1) * GIB, GIB)
    if not slurm:
        assert find_room(4, tmp_path).size == (free / 4 + 1) * GIB


def test_without_proc_the_machine_s_memory_counts(tmp_path):
    assert find_room(root=tmp_path).limit == "the machine's"


def judge(needed, first=1.0, **changes):
    """Needs this many GiB of 10: 1 is held, `first` is for gradients, the rest for four samples."""
    need = Need({"gradients": first * GIB, "workers": 0.0}, (needed - 1 - first) * GIB / 4, 4)
    room = Room(10.0 * GIB, "MemAvailable", GIB)
    refuse_excess("batch_size=4: a step", need._replace(**changes), room, lambda n: f"n={n} fits")


def test_what_surely_does_not_fit_is_refused_with_a_table(monkeypatch, capsys):
    """Where memory is tight, the check also gives freed memory back at once."""
    calls = []
    monkeypatch.setattr("common.memory.give_back_freed_memory", lambda: calls.append(1))
    judge(3.9)
    assert not calls
    judge(8.4)
    assert calls
    assert capsys.readouterr().out == ""
    judge(10.9)
    assert "warning: batch_size=4: a step needs about 10.9 GiB" in capsys.readouterr().out
    with expect_refusal(
        r"a step needs about 12 GiB, of 10 that are there \(MemAvailable\): held now 1, "
        r"gradients 1, 4 samples 10; n=2 fits\."
    ):
        judge(12)


def test_what_compiled_code_may_save_is_refused_only_where_the_rest_does_not_fit(capsys):
    judge(30, doubt=" at most")
    assert "warning: batch_size=4: a step needs about 30 GiB at most" in capsys.readouterr().out
    with expect_refusal("needs about 41 GiB at most, .* n=0 fits"):
        judge(41, first=12.0, doubt=" at most")
