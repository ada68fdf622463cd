"""Does something terrible in its fourth step; the file named by the first argument says what."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.nn.functional as F
from common import Net, batch

torch.manual_seed(1)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def misbehave(kind, loss):
    if kind == "exception":
        raise ValueError("the data are corrupt")
    if kind == "exit":
        sys.exit(0)
    if kind == "hard_exit":
        os._exit(3)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "abort":
        os.abort()
    if kind == "hang":
        time.sleep(1000)
    if kind == "stubborn_hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(0.01)
    if kind == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if kind == "nan":
        return loss * float("nan")
    if kind == "oom":
        torch.empty(2**60)
    if kind == "memory_error":
        raise MemoryError
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "endless_output":
        while True:
            print("still here " * 100)
    if kind == "orphans":
        for new_session in (False, True):
            subprocess.Popen(["sleep", "1000"], start_new_session=new_session)
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(7)
    return loss


for step in range(100):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    if step == 3:
        with open(sys.argv[1]) as stream:
            loss = misbehave(stream.read().strip(), loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
