"""Stand-in for nvcc: compiles a .cu file with g++ into a shared object that the emulated driver loads as a cubin.

The source is preprocessed with the emulator's headers in front. What C++ cannot express by macros is then rewritten
in the preprocessed text, whose line markers keep every error and report at the place of the .cu file:

- `__global__` becomes a visible function, and a trampoline is appended that unpacks its arguments;
- `__shared__` variables become references into the memory of the running block;
- `__launch_bounds__` and `__cluster_dims__` go into the trampoline's record;
- inline assembly becomes a call of the driver (`INSTRUCTIONS`).

Environment: EMULATOR_HOME is the folder that `build.py` made, EMULATOR_SANITIZE chooses a checked build,
EMULATOR_MACHINE holds flags for this processor. Starting Python is a good part of what small sources take: this imports
little, and what it imports it uses.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

DEVICE_HEADER, C_HEADERS = "emulator/device.h", "-DEMU_C_HEADERS"
INCLUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


class CompileError(Exception):
    """What nvcc would print before it gives up."""


# ------------------------------------------------------------------ command line


class Arguments:
    """The part of nvcc's command line that matters here; what only tunes code generation is accepted and dropped."""

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self.action = ""
        self.output = ""
        self.preprocessor: list[str] = []
        self.standard = "c++17"
        self.arch = 900
        self.specific = False  # an architecture such as sm_90a, with instructions of its own
        self.no_line_markers = False
        self.usage = False  # -Xptxas -v


VALUE_OPTIONS = {
    "-arch": "arch", "--gpu-architecture": "arch", "-code": "", "--gpu-code": "", "-gencode": "gencode",
    "--generate-code": "gencode", "-o": "output", "--output-file": "output", "-std": "standard", "--std": "standard",
    "-Xptxas": "ptxas", "--ptxas-options": "ptxas", "-Xcompiler": "host", "--compiler-options": "host",
    "-maxrregcount": "", "--maxrregcount": "", "-ccbin": "", "--compiler-bindir": "", "-Xnvlink": "",
    "--relocatable-device-code": "", "-rdc": "", "-diag-suppress": "", "--diag-suppress": "", "-fmad": "", "--fmad": "",
    "-ftz": "", "--ftz": "", "-prec-div": "", "--prec-div": "", "-prec-sqrt": "", "--prec-sqrt": "",
    "--threads": "", "-t": "", "--split-compile": "", "-Xcudafe": "",
}  # fmt: skip
FLAGS = {
    "--use_fast_math", "-use_fast_math", "-lineinfo", "--generate-line-info", "-G", "--device-debug", "-g", "--debug",
    "-O0", "-O1", "-O2", "-O3", "--keep", "-keep", "-m64", "-w", "--disable-warnings", "--expt-relaxed-constexpr",
    "-expt-relaxed-constexpr", "--expt-extended-lambda", "-extended-lambda", "--extended-lambda", "-res-usage",
    "--restrict", "-restrict", "-Wno-deprecated-gpu-targets", "-dc", "-dlto", "--extra-device-vectorization",
}  # fmt: skip
ACTIONS = {"--cubin", "-cubin", "--ptx", "-ptx", "--fatbin", "-fatbin", "--preprocess", "-E", "-MM"}


def parse(argv: list[str]) -> Arguments:
    """Reads nvcc's options.

    Raises:
        CompileError: for an option nvcc does not know either.
    """
    result = Arguments()
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        name, joined, value = word.partition("=")
        if word in ACTIONS:
            result.action = {"-E": "preprocess", "-MM": "dependencies"}.get(word, word.lstrip("-"))
        elif word in FLAGS:
            result.usage |= word == "-res-usage"
        elif word[:2] in ("-I", "-D", "-U") and not word.startswith("--"):
            if len(word) == 2:
                word += argv[position]
                position += 1
            result.preprocessor.append(word)
        elif name in ("--include-path", "--define-macro"):
            if not joined:
                value = argv[position]
                position += 1
            result.preprocessor.append({"--include-path": "-I", "--define-macro": "-D"}[name] + value)
        elif name in VALUE_OPTIONS:
            if not joined:
                if position == len(argv):
                    raise CompileError(f"nvcc fatal   : Option '{word}' needs a value")
                value = argv[position]
                position += 1
            apply(result, VALUE_OPTIONS[name], value)
        elif word.startswith("-"):
            raise CompileError(f"nvcc fatal   : Unknown option '{word}'")
        else:
            result.inputs.append(word)
    return result


def apply(result: Arguments, kind: str, value: str) -> None:
    """Enters one option that has a value."""
    if kind == "output":
        result.output = value
    elif kind == "standard":
        result.standard = value
    elif kind in ("arch", "gencode"):
        if value in ("native", "all", "all-major"):
            return
        number = re.search(r"(?:sm|compute)_(\d+)([af]?)", value)
        if not number:
            raise CompileError(f"nvcc fatal   : Unsupported gpu architecture '{value}'")
        result.arch, result.specific = int(number[1]) * 10, bool(number[2])
        if not 500 <= result.arch <= 900:
            raise CompileError(f"nvcc fatal   : Unsupported gpu architecture '{value}' (the emulated device is sm_90)")
    elif kind == "ptxas":
        result.usage |= "-v" in value
    elif kind == "host":
        result.no_line_markers |= "-P" in value.split(",")


# ------------------------------------------------------------------ rewriting


class Kernel:
    """One __global__ function that can be launched."""

    def __init__(self) -> None:
        self.name = ""  # as C++ spells it from file scope
        self.launch_bounds = ""
        self.cluster = ""
        self.words: set[str] = set()
        self.shared: set[int] = set()
        self.lockstep = ""  # a volatile pointer to shared memory in a kernel without __syncwarp


class Scope:
    """An open brace: a namespace (or extern "C"), or the body of something, for which that is None."""

    def __init__(self, namespace: str | None, function: str, start: int) -> None:
        self.namespace, self.function, self.start = namespace, function, start
        self.kernel: Kernel | None = None


TOKEN = re.compile(
    r"""(?P<line>^[ \t]*\#[^\n]*$)
      | (?P<string>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]*)\(.*?\)(?P=delimiter)"
          | "(?:[^"\\\n]|\\.)*" | (?<![0-9a-fA-F])'(?:[^'\\\n]|\\.)+')
      | (?P<word>\b(?:__global__|__shared__|__launch_bounds__|__cluster_dims__|asm)\b)
      | (?P<mark>[{};()])""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
OPENING = {"(": ")", "[": "]", "{": "}"}


def closing(text: str, start: int) -> int:
    """The index behind the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}]').finditer(text, start):
        mark = match[0]
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
            if depth == 0:
                return match.end()
    raise CompileError("error: unbalanced brackets")


def split_top(text: str, separator: str) -> Iterator[str]:
    """Splits at a separator that stands in no bracket."""
    depth = 0
    start = 0
    for index, mark in enumerate(text):
        if mark in "([{<":
            depth += 1
        elif mark in ")]}>":
            depth -= 1
        elif mark == separator and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def strip_line_marks(text: str) -> str:
    """The text without the preprocessor's line markers."""
    return re.sub(r"^[ \t]*#[^\n]*$", "", text, flags=re.MULTILINE)


ALIGNMENT = re.compile(
    r"__attribute__\s*\(\(\s*aligned\s*\([^()]*(?:\([^()]*\))?[^()]*\)\s*\)\)|\balignas\s*\([^()]*\)"
)
SPECIFIERS = re.compile(rf"((?:\b(?:static|extern|volatile|const|inline)\b|{ALIGNMENT.pattern}|\s)*)$")


def lockstep_pointer(body: str) -> str:
    """The volatile pointer to shared memory in a kernel that synchronises no warp: it counts on lockstep."""
    if re.search(r"\b(__syncwarp|cooperative_groups)\b", body):
        return ""
    shared = set(re.findall(r"\b__shared__\b[^;]*?(\w+)\s*(?:\[[^;]*)?;", body))
    pointers = re.findall(r"\bvolatile\b[\w\s:<>]*\*\s*(\w+)\s*=\s*(?:\([^()]*\)\s*)?&?\s*(\w+)", body)
    return next((pointer for pointer, target in pointers if target in shared), "")


# What stands for an instruction of inline assembly, given the expressions of its operands as they follow each other.
SITE = "EmuSite{__builtin_FILE(), __builtin_LINE()}"
Call = Callable[[Sequence[str]], str]


def ldmatrix(count: int, transposed: bool) -> Call:
    """`count` registers and an address."""

    def call(x: Sequence[str]) -> str:
        copies = "".join(f" {x[i]} = emu_r[{i}];" for i in range(count))
        return f"unsigned emu_r[{count}]; emu_ldmatrix(emu_r, {count}, {int(transposed)}, {x[count]}, {SITE});{copies}"

    return call


def mma(factor: str) -> Call:
    """Four sums, four registers of a, two of b, four sums to add to."""

    def call(x: Sequence[str]) -> str:
        a, b, c = (", ".join(x[first:end]) for first, end in ((4, 8), (8, 10), (10, 14)))
        copies = "".join(f" {x[i]} = emu_c[{i}];" for i in range(4))
        return (
            f"float emu_c[] = {{{c}}}; const unsigned emu_a[] = {{{a}}}, emu_b[] = {{{b}}}; "
            f"emu_mma(emu_c, emu_a, emu_b, EMU_{factor}, {SITE});{copies}"
        )

    return call


def cp_async(size: int) -> Call:
    """Both addresses, the size, and how much of it is taken from the source."""
    return lambda x: f"emu_cp_async({x[0]}, {x[1]}, {size}, {x[3] if len(x) > 3 else size}, {SITE});"


def bulk_tensor(x: Sequence[str]) -> str:
    """Where to, the tensor map, two coordinates, the mbarrier, and which blocks of the cluster."""
    to, place, column, row, barrier, *mask = x
    return (
        f"emu_bulk_tensor({to}, reinterpret_cast<const void *>{place}, {column}, {row}, {barrier}, "
        f"{mask[0] if mask else -1}, {SITE});"
    )


def wgmma(columns: int, factor: str) -> Call:
    """Half as many sums as there are columns, both descriptors, and whether either matrix is MN-major."""

    def call(x: Sequence[str]) -> str:
        count = columns // 2
        sums = ", ".join(f"&{operand}" for operand in x[:count])
        a, b, *_, a_mn, b_mn = x[count:]
        return (
            f"float *emu_d[] = {{{sums}}}; emu_wgmma(emu_d, {columns}, {a}, {b}, {a_mn}, {b_mn}, EMU_{factor}, {SITE});"
        )

    return call


# By an instruction's text with constraints in the place of operands.
INSTRUCTIONS: dict[str, Call] = {
    **{
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * transposed}.shared.b16 "
        f"{{{','.join(['=r'] * count)}}},[r]": ldmatrix(count, transposed)
        for count in (1, 2, 4)
        for transposed in (False, True)
    },
    **{
        f"mma.sync.aligned.{shape}.f32 {{{out}}},{{r,r,r,r}},{{r,r}},{{{added}}}": mma(factor)
        for shape, factor in (
            ("m16n8k16.row.col.f32.bf16.bf16", "BF16"),
            ("m16n8k16.row.col.f32.f16.f16", "F16"),
            ("m16n8k8.row.col.f32.tf32.tf32", "TF32"),
        )
        for out, added in (("=f,=f,=f,=f", "f,f,f,f"), ("+f,+f,+f,+f", "+f,+f,+f,+f"))
    },
    **{
        f"cp.async.{cache}.shared.global [r],[l],{size}{suffix}": cp_async(size)
        for cache, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16))
        for suffix in ("", ",r")
    },
    "cp.async.commit_group": lambda _: "emu_async_commit();",
    **{f"cp.async.wait_group {groups}": lambda x: f"emu_async_wait({x[0]});" for groups in ("n", *range(8))},
    "cp.async.wait_all": lambda _: "emu_async_wait(~0u);",
    "mbarrier.init.shared::cta.b64 [r],r": lambda x: f"emu_mbarrier_init({x[0]}, {x[1]}, {SITE});",
    "mbarrier.arrive.shared::cta.b64 _,[r]": lambda x: f"emu_mbarrier_arrive({x[0]}, {SITE});",
    # It returns when the phase has ended, where a GPU may give up before that.
    "{ .reg.predp;mbarrier.try_wait.parity.shared::cta.b64p,[r],r;selp.b32=r,1,0,p;}": lambda x: (
        f"emu_mbarrier_wait({x[0]}, {x[1]}, {SITE}); {x[2]} = 1;"
    ),
    "{ .reg.predp;mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64p,[r],r;selp.b32=r,1,0,p;}": lambda x: (
        f"emu_mbarrier_wait({x[0]}, {x[1]}, {SITE}); {x[2]} = 1;"
    ),
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _,[r]": lambda x: f"emu_mbarrier_arrive({x[0]}, {SITE});",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _,[r],r": lambda x: f"emu_mbarrier_expect({x[0]}, {x[1]}, {SITE});",
    "fence.mbarrier_init.release.cluster": lambda _: "",  # barriers of a cluster order everything here
    "mapa.shared::cluster.u32 =r,r,r": lambda x: f"{x[0]} = emu_map_address({x[1]}, {x[2]}, {SITE});",
    "barrier.cluster.arrive.release": lambda _: f"emu_self->cluster_token = emu_barrier_arrive(EMU_CLUSTER, {SITE});",
    "barrier.cluster.wait.acquire": lambda _: f"emu_barrier_wait(EMU_CLUSTER, emu_self->cluster_token, {SITE});",
    **{
        f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{cast} "
        f"[r],[l,{{r,r}}],[r]{mask}": bulk_tensor
        for cast, mask in (("", ""), (".multicast::cluster", ",h"))
    },
    "fence.proxy.async.shared::cta": lambda _: "emu_proxy_fence();",
    "fence.proxy.tensormap::generic.acquire.sys [l],128": lambda x: (
        f"emu_acquire_map(reinterpret_cast<const void *>{x[0]}, {SITE});"
    ),
    "": lambda _: "",  # no instruction: it says to the compiler what is used here
    "wgmma.fence.sync.aligned": lambda _: f"emu_wgmma_fence({SITE});",
    "wgmma.commit_group.sync.aligned": lambda _: f"emu_wgmma_commit({SITE});",
    **{
        f"wgmma.wait_group.sync.aligned {groups}": lambda x: f"emu_wgmma_wait({x[0]}, {SITE});"
        for groups in ("n", *range(8))
    },
    # Both factors from shared memory, added to the sums, neither negated.
    **{
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
        f"{{{','.join(['+f'] * (columns // 2))}}},l,l,1,1,1,n,n": wgmma(columns, factor)
        for columns in range(8, 257, 8)
        for kind, factor in (("bf16", "BF16"), ("f16", "F16"))
    },
}
# Instructions of these names are those of one architecture alone.
SPECIFIC = re.compile(r"wgmma\.|setmaxnreg\.")


def call_for(statement: str, specific: bool) -> str:
    """Returns C++ for what stands in the brackets of an asm statement.

    Args:
        statement: as above.
        specific: the architecture is one with instructions of its own.

    Raises:
        CompileError: the emulator does not know it, or the architecture has no such instruction.
    """
    template, *sections = pieces(statement, ":")
    text = " ".join("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).removesuffix("\\n").split()).rstrip("; ")
    operands = [operand.strip() for section in sections[:2] for operand in pieces(section, ",") if operand.strip()]
    constraints = [operand.split('"')[1] for operand in operands]
    expressions = [operand[operand.index("(") :] for operand in operands]
    name, _, rest = text.partition(" ")
    used = re.findall(r"%(\d+)|\b(\d+)\b", rest)
    if any(number and int(number) >= len(operands) for number, _ in used):
        raise CompileError(f"error: inline assembly '{text}' has {len(operands)} operands")
    form = re.sub(r"%(\d+)", lambda match: constraints[int(match[1])], rest.replace(" ", ""))
    call = INSTRUCTIONS.get(f"{name} {form}".strip())
    if call is None:
        pattern = f"{name} {form}".strip()
        raise CompileError(
            f"error: the emulator does not know the inline assembly '{text}', with operands as '{pattern}'"
        )
    if SPECIFIC.match(name) and not specific:
        raise CompileError(f"ptxas error   : Instruction '{name}' is not supported but on .target 'sm_90a'")
    return f"do {{ {call([expressions[int(n)] if n else constant for n, constant in used])} }} while (0)"


def pieces(text: str, separator: str) -> list[str]:
    """Splits at a separator that stands in no bracket and no string."""
    parts, depth = [""], 0
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|.', text, re.DOTALL):
        depth += (token in "([{") - (token in ")]}")
        if token == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts


class Rewriter:
    """Walks over preprocessed text once and collects what has to change."""

    def __init__(self, text: str, arguments: Arguments) -> None:
        self.text, self.arguments = text, arguments
        self.out: list[str] = []
        self.copied = 0
        self.kernels: list[Kernel] = []
        self.functions: dict[str, tuple[set[str], set[int]]] = {}  # words of the body, ids of its __shared__
        self.scopes: list[Scope] = []
        self.shared_count = 0

    def replace(self, start: int, end: int, new: str) -> None:
        """Puts `new` in place of a stretch, keeping its line ends."""
        old = self.text[start:end]
        self.out.append(self.text[self.copied : start])
        self.out.append(new)
        missing = old.count("\n") - new.count("\n")
        self.out.append("\n" * max(0, missing))
        self.copied = end

    def own_headers(self) -> int:
        """Where the headers end that stand before every source: most of the text, and nothing in it has to change."""
        mark = '\n# 0 "<command-line>" 2\n'
        end = self.text.rfind(mark) + len(mark)
        changed = re.search(r"\b(__global__|__shared__|__launch_bounds__|__cluster_dims__)\b", self.text[: max(end, 0)])
        return 0 if end < len(mark) or changed else end

    @property
    def in_body(self) -> bool:
        return bool(self.scopes) and self.scopes[-1].namespace is None

    def run(self) -> str:
        """Returns the rewritten text."""
        statement = self.own_headers()  # where the running declaration begins
        parentheses = 0
        skip_to = 0
        pending: Kernel | None = None
        for match in TOKEN.finditer(self.text, statement):
            if match.start() < skip_to:
                continue
            if match["line"] is not None or match["string"] is not None:
                continue
            token = match[0]
            if token == "(":
                parentheses += 1
            elif token == ")":
                parentheses -= 1
            elif token == "__global__":
                self.replace(match.start(), match.end(), '__attribute__((used, visibility("default")))')
                pending = Kernel()
            elif token in ("__launch_bounds__", "__cluster_dims__"):
                opening = self.text.index("(", match.end())
                end = closing(self.text, opening)
                value = strip_line_marks(self.text[opening + 1 : end - 1])
                self.replace(match.start(), end, "")
                skip_to = end
                if pending and token == "__launch_bounds__":
                    pending.launch_bounds = value
                elif pending:
                    pending.cluster = value
            elif token == "__shared__":
                skip_to = self.shared_declaration(statement, match.start(), match.end())
                statement = skip_to
            elif token == "asm" and self.is_user_text(match.start()):
                skip_to = self.assembly(match.start(), match.end())
                statement = skip_to
            elif token == ";" and parentheses == 0:
                if pending:
                    self.explicit_instantiation(statement, match.start(), pending)
                    pending = None
                statement = match.end()
            elif token == "{":
                self.open_scope(statement, match.start(), pending)
                pending = None
                statement = match.end()
                parentheses = 0
            elif token == "}":
                self.close_scope(match.start())
                statement = match.end()
                parentheses = 0
        self.out.append(self.text[self.copied :])
        return "".join(self.out)

    # -- functions

    def head(self, start: int, end: int) -> str:
        """A declaration up to its body, without attributes."""
        text = strip_line_marks(self.text[start:end])
        for word in ("__launch_bounds__", "__cluster_dims__", "__attribute__"):
            while (at := text.find(word)) >= 0:
                text = text[:at] + text[closing(text, text.index("(", at)) :]
        return text

    def open_scope(self, statement: int, brace: int, kernel: Kernel | None) -> None:
        head = self.head(statement, brace)
        if self.in_body:
            self.scopes.append(Scope(None, "", brace))
            return
        space = re.search(r"\bnamespace\s*([\w:]*)\s*$", head)
        if space or re.search(r'\bextern\s*"C(\+\+)?"\s*$', head):
            self.scopes.append(Scope(space[1] if space else "", "", brace))
            return
        name = re.search(r"([\w:~]+|operator\s*\S+)\s*\(", head)
        scope = Scope(None, name[1] if name else "", brace)
        if kernel and name and not re.search(r"\btemplate\s*<", head):
            kernel.name = self.qualified(name[1])
            scope.kernel = kernel
            self.kernels.append(kernel)
        self.scopes.append(scope)

    def close_scope(self, brace: int) -> None:
        if not self.scopes:
            return
        scope = self.scopes.pop()
        if scope.namespace is not None or (self.scopes and self.scopes[-1].namespace is None):
            return
        if scope.kernel:
            body = self.text[scope.start : brace]
            scope.kernel.words |= set(re.findall(r"\w+", body))
            scope.kernel.lockstep = lockstep_pointer(body)
        if scope.function and ("__shared__" in self.text[scope.start : brace] or self.is_user_text(scope.start)):
            words, _ = self.functions.setdefault(scope.function, (set(), set()))
            words |= set(re.findall(r"\w+", self.text[scope.start : brace]))

    def is_user_text(self, position: int) -> bool:
        """Whether the place comes from the .cu file or its own includes, not from a header of the system."""
        marker = self.text.rfind("\n# ", 0, position)
        line = self.text[marker + 1 : self.text.find("\n", marker + 1)] if marker >= 0 else ""
        return not (INCLUDE in line or "/usr/" in line)

    def qualified(self, name: str) -> str:
        return "::".join([s.namespace for s in self.scopes if s.namespace] + [name])

    def explicit_instantiation(self, statement: int, end: int, kernel: Kernel) -> None:
        """`template __global__ void name<float>(float *);` makes a launchable kernel of a template."""
        head = self.head(statement, end)
        match = re.search(r"\btemplate\s+(?!<).*?\bvoid\s+([\w:]+\s*<.*>)\s*\(", head, re.DOTALL)
        if match and not self.in_body:
            kernel.name = self.qualified(match[1])
            kernel.words = {re.match(r"[\w:]+", match[1])[0]}  # type: ignore[index]
            self.kernels.append(kernel)

    # -- shared memory

    def shared_declaration(self, statement: int, start: int, end: int) -> int:
        """Rewrites one declaration with __shared__; returns where it ends."""
        depth = 0
        stop = end
        while stop < len(self.text):
            mark = self.text[stop]
            if mark in "([{":
                depth += 1
            elif mark in ")]}":
                depth -= 1
            elif mark == ";" and depth == 0:
                break
            stop += 1
        before = strip_line_marks(self.text[statement:start])
        # Only the specifiers directly in front belong to the declaration; labels and the like stay.
        specifiers = SPECIFIERS.search(before)
        front = specifiers[1] if specifiers else ""
        body = strip_line_marks(self.text[end:stop]).strip()
        declaration = " ".join((front + " " + body).split())
        dynamic = bool(re.search(r"\bextern\b", declaration))
        declaration = re.sub(r"\b(static|extern|inline)\b", "", declaration).strip()
        first = self.text.rfind(front, statement, start) if front.strip() else start
        if first < statement:
            first = start
        new = self.dynamic_shared(declaration) if dynamic else self.static_shared(declaration)
        self.replace(first if first >= self.copied else start, stop + 1, new)
        return stop + 1

    def dynamic_shared(self, declaration: str) -> str:
        match = re.match(r"(.*?)(\w+)\s*((?:\[[^\]]*\])+)$", ALIGNMENT.sub("", declaration).strip(), re.DOTALL)
        if not match:
            raise CompileError(f"error: extern __shared__ needs an array: '{declaration}'")
        kind, name, extent = (part.strip() for part in match.groups())
        if self.in_body:
            return f"{kind} (&{name}){extent} = *reinterpret_cast<{kind} (*){extent}>(emu_self->shared_dynamic);"
        return f"static emu::DynamicShared<{kind}> {name};"

    def static_shared(self, declaration: str) -> str:
        if not self.in_body:
            raise CompileError(f"error: a __shared__ variable outside a function is not modelled: '{declaration}'")
        self.shared_count += 1
        number = self.shared_count
        for scope in self.scopes:
            if scope.namespace is None:  # the outermost body is the function
                if scope.kernel:
                    scope.kernel.shared.add(number)
                elif scope.function:
                    self.functions.setdefault(scope.function, (set(), set()))[1].add(number)
                break
        struct = f"emu_shared_{number}"
        names = []
        for part in split_top(declaration, ","):
            match = re.search(r"(\w+)\s*((?:\[.*\])?)\s*$", part, re.DOTALL)
            if not match:
                raise CompileError(f"error: cannot read the __shared__ declaration '{declaration}'")
            names.append(re.search(r"(\w+)\s*(?:\[|$)", part)[1])  # type: ignore[index]
        references = "".join(f" auto &{name} = emu::StaticShared<{struct}, {number}>::get().{name};" for name in names)
        return f"struct {struct} {{ {declaration}; }};{references}"

    def assembly(self, start: int, end: int) -> int:
        """Rewrites one asm statement; returns where its closing bracket is."""
        opening = self.text.index("(", end)
        stop = closing(self.text, opening)
        statement = strip_line_marks(self.text[opening + 1 : stop - 1])
        self.replace(start, stop, call_for(statement, self.arguments.specific))
        return stop

    # -- the appended part

    def trampolines(self) -> str:
        """Records of all kernels, to be compiled behind the source."""
        lines = ['\n# 1 "trampolines"']
        made_for = f"{self.arguments.arch // 10}{'a' * self.arguments.specific}"
        visible = '__attribute__((used, visibility("default")))'
        lines.append(f'extern "C" {visible} const char emu_architecture[] = "{made_for}";')
        if checked():
            lines.append(f'extern "C" {{ {visible} char emu_checked_build; }}')
        for index, kernel in enumerate(self.kernels):
            reach = set(kernel.shared)
            visited: set[str] = set()
            words = list(kernel.words)
            while words:
                word = words.pop()
                if word in visited or word not in self.functions:
                    continue
                visited.add(word)
                called, ids = self.functions[word]
                reach |= ids
                words.extend(called)
            ids = ", ".join(str(number) for number in sorted(reach)) or "0"
            bounds = kernel.launch_bounds or "0"
            name = kernel.name.replace('"', "")
            lockstep = f'"{kernel.lockstep}"' if kernel.lockstep else "nullptr"
            lines.append(
                f"static const uint32_t emu_shared_ids_{index}[] = {{{ids}}};\n"
                f'static emu::Registration emu_registration_{index}(emu::Trampoline<&{name}>{{}}, "{name}", '
                f"reinterpret_cast<void *>(&{name}), emu::first({bounds}), emu_cluster({kernel.cluster}), "
                f"emu_shared_ids_{index}, {len(reach)}, {lockstep});"
            )
        return "\n".join(lines) + "\n"


# ------------------------------------------------------------------ compiling


def library() -> str:
    """The folder with libcuda.so.1."""
    place = os.environ.get("EMULATOR_HOME")
    if not place:
        raise CompileError("nvcc fatal   : EMULATOR_HOME is not set; start through tests/emulator/run")
    return os.path.join(place, "lib")


def checked() -> bool:
    """Whether kernels are to be compiled with every access instrumented."""
    return os.environ.get("EMULATOR_SANITIZE", "off") not in ("", "off")


def level() -> str:
    """How much g++ optimizes: -O0 is for kernels that are compiled once and hardly run."""
    return "0" if os.environ.get("EMULATOR_OPTIMIZE") == "0" else "1"


def machine_flags() -> list[str]:
    """Flags for this processor (build.py)."""
    return os.environ.get("EMULATOR_MACHINE", "").split()


def options(standard: str) -> list[str]:
    """What g++ compiles a source of a GNU standard with."""
    flags = [f"-std={standard}", "-fPIC", "-w", "-gdwarf-4", "-g1", "-fno-gnu-unique",
             "-fno-strict-aliasing", "-fno-math-errno", "-fno-semantic-interposition",
             "-fwrapv", *machine_flags()]  # fmt: skip
    if checked():
        # No way back from what is misaligned, which ends the launch: compiled in a fifth less time. Most of that goes
        # into the checks, whatever the code between them: -Og is compiled in two thirds of -O1's.
        flags += ["-O0" if level() == "0" else "-Og", "-fno-tree-vectorize", "-fsanitize=thread,alignment",
                  "-fno-sanitize-recover=alignment", "--param=tsan-distinguish-volatile=1"]  # fmt: skip
    else:
        # Compiling is most of what tests on the emulator take, and -O1 a third cheaper than -O2. The others join
        # products and sums, as nvcc does, and stores of vectors, whose misalignment is then noticed.
        flags += [f"-O{level()}", "-fexpensive-optimizations", "-ftree-slp-vectorize"]
    return flags


def preprocess(arguments: Arguments, source: str, action: str = "-E") -> str:
    """The source behind the emulator's headers, all macros expanded; or with -MM the files that it includes."""
    text = run_preprocessor(arguments, source, action, C_HEADERS)
    # A source that needs C++'s headers gets those alone: they are incompatible with C's.
    return run_preprocessor(arguments, source, action) if re.search(r"\bstd\b", text) else text


def run_preprocessor(arguments: Arguments, source: str, action: str, *extra: str) -> str:
    """What g++ prints with these options and more."""
    standard = gnu(arguments.standard)
    as_precompiled = (action, standard, *extra) == (
        "-E",
        "gnu++17",
        C_HEADERS,
    ) and not arguments.no_line_markers
    command = [
        "g++", action, "-x", "c++", *([f"-I{precompiled()}", "-fpch-preprocess"] if as_precompiled else []),
        f"-I{INCLUDE}", "-include", DEVICE_HEADER, *macros(), f"-D__CUDA_ARCH__={arguments.arch}",
        *(["-P"] if arguments.no_line_markers else []), *options(standard), *arguments.preprocessor, *extra, source,
    ]  # fmt: skip
    return run(command)


def macros() -> list[str]:
    """What is defined for every source, whatever the architecture."""
    defined = ["__CUDACC__", "__NVCC__", "__CUDACC_VER_MAJOR__=13", "__CUDACC_VER_MINOR__=0", "DPTRAIN_EMULATOR=1"]
    return [f"-D{definition}" for definition in [*defined, *(["EMU_CHECKED=1"] if checked() else [])]]


def precompiled() -> str:
    """The folder of the precompiled header for these options of g++."""
    return os.path.join(os.path.dirname(INCLUDE), "precompiled", f"{'checked' if checked() else 'plain'}-O{level()}")


def precompile() -> None:
    """Compiles the header before every source: parsing it is half of what small ones take.

    What is preprocessed then names the file. For a source that needs C++'s headers or another standard, or defines a
    macro that the header uses, g++ reads the header itself.
    """
    header, result = (os.path.join(folder, DEVICE_HEADER) for folder in (INCLUDE, precompiled()))
    os.makedirs(os.path.dirname(result), exist_ok=True)
    arguments = [*macros(), C_HEADERS, *options("gnu++17"), header, "-o", f"{result}.gch"]
    run(["g++", "-x", "c++-header", f"-I{INCLUDE}", *arguments])


def gnu(standard: str) -> str:
    """The GNU flavour of a C++ standard, at least C++17: the device header needs it."""
    number = standard.removeprefix("gnu++").removeprefix("c++")
    return "gnu++" + ("17" if number in ("03", "11", "14") else number)


def compile_source(arguments: Arguments, source: str, output: str) -> None:
    """Compiles one source to a module."""
    rewriter = Rewriter(preprocess(arguments, source), arguments)
    text = rewriter.run() + rewriter.trampolines()
    if os.environ.get("EMULATOR_KEEP"):
        with open(os.environ["EMULATOR_KEEP"], "w") as file:
            file.write(text)
    # The result comes into place at once: nobody may read half a file.
    unit, result = f"{output}.{os.getpid()}.o", f"{output}.{os.getpid()}"
    try:
        # Two steps: the link must not see -fsanitize, or it would add the compiler's own runtime. Nor does it look at
        # C++'s library, of which the driver brings what a source needs.
        run(["g++", "-c", *options(gnu(arguments.standard)), "-x", "c++-cpp-output", "-", "-o", unit], text)
        run(["g++", "-shared", "-Wl,-Bsymbolic", "-Wl,-z,now", unit, f"-L{library()}", "-l:libcuda.so.1",
             "-nodefaultlibs", "-lgcc", "-lm", "-lc", "-o", result])  # fmt: skip
        inspect(result, arguments.usage)
        os.replace(result, output)
    finally:
        for path in (unit, result):
            if os.path.exists(path):
                os.unlink(path)


def run(command: list[str], stdin: str = "") -> str:
    """What a command prints.

    Raises:
        CompileError: with what it says when it fails.
    """
    finished = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise CompileError(finished.stderr.rstrip())
    return finished.stdout


def inspect(module: str, usage: bool) -> None:
    """Lets the driver library read the module back and complain where ptxas would."""
    driver = ctypes.CDLL(os.path.join(library(), "libcuda.so.1"))
    if driver.emu_inspect_module(os.path.abspath(module).encode(), int(usage)):
        raise CompileError("")


def main(argv: list[str]) -> None:
    """Runs the stand-in."""
    try:
        arguments = parse(argv)
        if len(arguments.inputs) != 1:
            raise CompileError("nvcc fatal   : exactly one input file is needed")
        source = arguments.inputs[0]
        if not os.path.isfile(source):
            raise CompileError(f"nvcc fatal   : Don't know what to do with '{source}'")
        if arguments.action in ("preprocess", "dependencies"):
            print(preprocess(arguments, source, "-MM" if arguments.action == "dependencies" else "-E"), end="")
            return
        if arguments.action not in ("cubin", "ptx", "fatbin"):
            raise CompileError("nvcc fatal   : the emulator makes cubins only (--cubin)")
        stem = os.path.splitext(os.path.basename(source))[0]
        compile_source(arguments, source, arguments.output or f"{stem}.{arguments.action}")
    except CompileError as error:
        if str(error):
            print(error, file=sys.stderr)
        sys.exit(1)
