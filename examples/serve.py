"""A trained model as a web service, with Python's standard library: one thread per request, all sharing one model.

    python examples/serve.py runs/X --port 8000
    curl -d '{"x": [[0.1, 0.2, 0.3, 0.4]]}' http://127.0.0.1:8000

returns `{"y": [[...]]}`, the rows of `model.predict(x)`; a request that the model cannot process gets status 400 and a
one-line `{"error": "..."}`. `runs/X` may also be a `.keras` file, or a `.program` from `model.export`. Only for trusted
networks: there is no authentication, and requests of any size are read.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

import dptrain as dp


def make_server(predict, port=0, host="127.0.0.1"):
    """Return a server of a function of arrays, which threads call at once; port 0 takes one that is free."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open
        disable_nagle_algorithm = True  # else a response waits 40 ms for the client to acknowledge its headers

        def do_POST(self):
            try:
                x = np.asarray(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["x"])
                status, answer = 200, {"y": np.asarray(predict(x)).tolist()}
            except (KeyError, TypeError, ValueError) as error:
                status, answer = 400, {"error": str(error)}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format, *arguments):
            """Say nothing about each request."""

    return ThreadingHTTPServer((host, port), Handler)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run's folder, a .keras file or a .program")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if options.model.endswith(".program"):
        predict = dp.saving.load_program(options.model)
    else:
        model = dp.models.load_model(options.model)
        predict = lambda x: model.predict(x, verbose=0)  # noqa: E731
    with make_server(predict, options.port) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
