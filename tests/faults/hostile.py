"""A training script that does in its fourth step what the file named by its first argument says (see the test)."""

import os
import resource
import signal
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
wish = ""


def misbehave(kind):
    if kind == "fork":  # both go on training, in one session
        os.fork()
    if kind == "daemon":  # out of the session and without our mark in its environment
        subprocess.run(["setsid", "--fork", "env", "-i", "sleep", "987654"], check=True)
    if kind == "daemon_then_crash":
        subprocess.run(["setsid", "--fork", "env", "-i", "sleep", "987654"], check=True)
        os._exit(5)
    if kind == "patch":
        torch.nn.functional.linear = lambda *a, **k: (_ for _ in ()).throw(RuntimeError("patched away"))
        torch.Tensor.backward = lambda *a, **k: None
    if kind == "chdir":
        os.chdir("/")
    if kind == "output":
        line = b"x" * 99_999 + b"\n"
        for _ in range(1000):
            os.write(1, line)
    if kind == "allocator":
        held, _ = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20, held))
        torch.empty(512 * 2**20, dtype=torch.uint8)
    if kind == "python_memory":
        with open("/proc/self/statm") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20, resource.RLIM_INFINITY))
        bytearray(512 * 2**20)
    if kind == "cuda_text":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity ...")
    if kind == "stubborn_family":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        loop = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(987654)"
        subprocess.Popen([sys.executable, "-c", loop])
        subprocess.Popen(["setsid", sys.executable, "-c", loop])
        time.sleep(987654)
    if kind == "full_disk":
        raise OSError(28, "No space left on device", "checkpoint.pt")


for step in range(100):
    try:
        x = torch.randn(8, 16)
        loss = F.mse_loss(model(x), x)
        if step == 3:
            with open(sys.argv[1]) as stream:
                wish = stream.read().strip()
            misbehave(wish)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= 3 and wish == "swallow":
            raise RuntimeError("something the script swallows")
    except BaseException:
        if step < 3 or wish != "swallow":
            raise
