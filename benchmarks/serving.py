"""A load test of `serve`, beside the same model in ONNX Runtime behind FastAPI; and `encode` of one row.

    python benchmarks/serving.py [--clients 64] [--seconds 20] [--turns 3]
    python benchmarks/serving.py --encode

Clients ask over connections that stay open, each for one row at a time; every answer is compared with `predict` of the
row alone. Servers take turns. FastAPI and ONNX Runtime are left out where they are not installed.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FEATURES, CLASSES, ROWS = 30, 3, 256
PEER = """
import sys
import numpy as np, onnxruntime, uvicorn
from fastapi import Body, FastAPI
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options)
name, app = session.get_inputs()[0].name, FastAPI()

@app.post("/predict")
def predict(rows: list[list[float]] = Body()):
    return {"predictions": session.run(None, {name: np.asarray(rows, np.float32)})[0].tolist()}

uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
"""


def build(folder: Path):
    """Save a small classifier; return its samples and what it predicts of each alone."""
    import dptrain as dp
    from dptrain import layers

    stack = [
        layers.Input((FEATURES,)),
        layers.Dense(64, "relu"),
        layers.Dense(64, "relu"),
        layers.Dense(CLASSES, "softmax"),
    ]
    model = dp.Sequential(stack, seed=1)
    model.compile("sgd", "sparse_categorical_crossentropy", device="cpu")
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype(np.float32)
    expected = np.concatenate([model.predict(x[row : row + 1], verbose=0) for row in range(ROWS)])
    model.save(folder / "model.keras")
    model.export(folder / "model.onnx", format="onnx")
    return x, expected


async def ask(port: int, requests: list[bytes], first: int, end: float, times: list[float], answers: list) -> int:
    """Ask until `end` over one connection; return how many answers had another status than 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lost, row = 0, first
    while time.monotonic() < end:
        begin = time.perf_counter()
        writer.write(requests[row % ROWS])
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        body = await reader.readexactly(length)
        times.append(time.perf_counter() - begin)
        lost += b" 200 " not in head[:13]
        answers.append((row % ROWS, body))
        row += 1
    writer.close()
    return lost


def load(port: int, requests: list[bytes], clients: int, seconds: float, read, expected) -> dict:
    """Return answers a second, milliseconds, and how many answers were lost or not those of the row alone."""
    times, answers = [], []

    async def all_clients():
        end = time.monotonic() + seconds
        tasks = [ask(port, requests, 7 * client, end, times, answers) for client in range(clients)]
        return sum(await asyncio.gather(*tasks))

    lost = asyncio.run(all_clients())
    unlike = sum(not read(json.loads(body), expected[row]) for row, body in answers)
    p50, p99 = (1000 * float(np.percentile(times, part)) for part in (50, 99))
    return {"answers": len(times), "rate": len(times) / seconds, "p50": p50, "p99": p99, "lost": lost, "unlike": unlike}


def same_bits(answer, expected) -> bool:
    """Whether an answer of dptrain's is the prediction of its row alone, to the bit."""
    (prediction,) = answer["predictions"]
    return np.array_equal(np.float32([*prediction["probabilities"].values()]), expected)


def nearly(answer, expected) -> bool:
    """Whether a peer's answer is the same prediction."""
    return np.allclose(answer["predictions"][0], expected, atol=1e-5)


def started(command: list[str], port: int) -> subprocess.Popen:
    """Start a server; return its process once it takes connections."""
    import socket

    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{command[0]} ended with {process.returncode}")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has taken."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def serve(clients: int, seconds: float, turns: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        x, expected = build(Path(folder))
        (Path(folder) / "peer.py").write_text(PEER)
        requests = []
        for row in x:
            body = json.dumps([row.tolist()]).encode()
            head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
            head += f"\r\nContent-Length: {len(body)}"
            requests.append(f"{head}\r\n\r\n".encode() + body)
        own = [sys.executable, "-m", "dptrain", "serve", f"{folder}/model.keras", "--access-log", "off", "--port"]
        servers = {"dptrain serve": ([*own, "8451"], 8451, same_bits)}
        servers["dptrain serve --batch-wait 2"] = ([*own, "8452", "--batch-wait", "2"], 8452, same_bits)
        if all(map(importlib.util.find_spec, ("fastapi", "onnxruntime"))):
            peer = [sys.executable, f"{folder}/peer.py", f"{folder}/model.onnx", "8453"]
            servers["ONNX Runtime, FastAPI"] = (peer, 8453, nearly)
        results: dict[str, list[dict]] = {name: [] for name in servers}
        for _ in range(turns):
            for name, (command, port, read) in servers.items():
                process = started(command, port)
                load(port, requests, clients, 1, read, expected)
                before = cpu_seconds(process.pid)
                run = load(port, requests, clients, seconds, read, expected)
                run["cpu"] = 1000 * (cpu_seconds(process.pid) - before) / run["answers"]
                results[name].append(run)
                process.send_signal(signal.SIGTERM)
                process.wait()
    print(f"{clients} clients, {turns} x {seconds:g} s each, load average {os.getloadavg()[0]:.1f}\n")
    print("| | answers | a second | CPU ms each | p50 ms | p99 ms | lost | unlike |\n|---|---|---|---|---|---|---|---|")
    for name, runs in results.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in ("rate", "cpu", "p50", "p99")}
        sums = {key: sum(run[key] for run in runs) for key in ("answers", "lost", "unlike")}
        least, most = min(run["rate"] for run in runs), max(run["rate"] for run in runs)
        cells = [name, f"{sums['answers']:,}", f"{middle['rate']:,.0f} ({least:,.0f} to {most:,.0f})"]
        cells += [f"{middle['cpu']:.2f}", f"{middle['p50']:.1f}", f"{middle['p99']:.1f}"]
        print(f"| {' | '.join([*cells, str(sums['lost']), str(sums['unlike'])])} |")


def encode() -> None:
    """Print CPU milliseconds of `encode` and `predict` of one row of a table of 14 columns: median (least)."""
    import pandas as pd

    import dptrain as dp
    from dptrain import layers
    from dptrain.data.preprocessing import Column, Preprocessing

    columns = [Column(f"n{index}", "number", mean=0.0) for index in range(9)] + [Column("day", "number", date=True)]
    columns += [Column(f"c{index}", "one-hot", tuple("abcdef")) for index in range(4)]
    preprocessing = Preprocessing("regression", tuple(columns), "price")
    model = dp.Sequential([layers.Input(preprocessing.sample_shape), layers.Dense(32, "relu"), layers.Dense(1)])
    model.compile("sgd", "mse", device="cpu")
    model.preprocessing = preprocessing
    record = {f"n{index}": index / 3 for index in range(9)} | {"day": "2026-11-29"}
    record |= {f"c{index}": "b" for index in range(4)} | {"price": 3.0}
    frame = pd.DataFrame([record])
    for name, rows in (("a record", record), ("a data frame", frame)):
        for what, call in (("encode", preprocessing.encode), ("predict", lambda rows: model.predict(rows, verbose=0))):
            call(rows)
            times = []
            for _ in range(15):
                begin = time.process_time()
                for _ in range(50):
                    call(rows)
                times.append((time.process_time() - begin) / 50 * 1000)
            print(f"| {what}, {name} | {statistics.median(times):.2f} ({min(times):.2f}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--encode", action="store_true", help="measure encode of one row instead")
    options = parser.parse_args()
    if options.encode:
        encode()
    else:
        serve(options.clients, options.seconds, options.turns)


if __name__ == "__main__":
    main()
