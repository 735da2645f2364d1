"""A trained model as a web service, with Python's standard library: one thread per request, all sharing one model.

    python examples/serve.py runs/X --port 8000
    curl -d '{"x": [[0.1, 0.2, 0.3, 0.4]]}' http://127.0.0.1:8000

returns `{"y": [[...]]}`, the rows of `model.predict(x)`; a request that the model cannot process gets status 400 and a
one-line `{"error": "..."}`. `runs/X` may also be a `.keras` file, or a `.program` from `model.export`. Only for trusted
networks: there is no authentication. JSON has no NaN and no infinity: such inputs get 400, such outputs 500. Bodies
have less than 100 MB; a refused one ends the connection, lest its rest be read as the next request.
"""

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

import dptrain as dp


def make_server(predict, port=0, host="127.0.0.1"):
    """Return a server of a function of arrays, which threads call at once; port 0 takes one that is free."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open
        disable_nagle_algorithm = True  # else a response waits 40 ms for the client to acknowledge its headers
        timeout = 60  # seconds without a byte after which a connection is closed

        def do_POST(self):
            try:
                x = np.asarray(json.loads(self.read_body())["x"])
                if x.dtype.kind == "f" and not np.isfinite(x).all():
                    raise ValueError("x has numbers that are not finite")
                status, answer = 200, {"y": np.asarray(predict(x)).tolist()}
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                status, answer = 400, {"error": str(error)}
            try:
                content = json.dumps(answer, allow_nan=False).encode()
            except ValueError:
                status, content = 500, b'{"error": "the model\'s outputs are not finite"}'
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content)

        def read_body(self):
            """Return the body, whose length has to be said once, in digits."""
            lengths = self.headers.get_all("Content-Length", [])
            if len(lengths) != 1 or not re.fullmatch("[0-9]{1,8}", lengths[0]) or "Transfer-Encoding" in self.headers:
                self.close_connection = True
                raise ValueError("expected one Content-Length, in digits, of less than 100 MB")
            return self.rfile.read(int(lengths[0]))

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
