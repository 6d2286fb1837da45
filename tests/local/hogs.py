"""Programs that take more than they may."""

from __future__ import annotations

HOG = "held = []\nwhile True: held.append(b'x' * (4 << 20))"


BOMB = """
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            time.sleep(600); os._exit(0)
        made += 1
except OSError as error:
    print("refused", made, flush=True)
os.killpg(0, 9)
"""
