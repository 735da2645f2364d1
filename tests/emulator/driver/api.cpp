// The driver API. cuda.h's own macros give each function here the versioned name that programs link (cuMemAlloc is
// cuMemAlloc_v2), so the prototypes are checked by the compiler. What is not here is in stubs.cpp.
#include <cudaProfiler.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include "api.hpp"

namespace emu {

bool initialised = false;

namespace {
constexpr unsigned max_threads = 1024, max_threads_per_sm = 2048, max_blocks_per_sm = 32;
constexpr size_t shared_default = 48 * 1024, shared_optin = 227 * 1024, shared_per_sm = 228 * 1024;
constexpr size_t shared_reserved = 1024;  // per block, taken by the system
constexpr unsigned max_cluster_portable = 8, max_cluster = 16;

pid_t owner = 0;
std::vector<int> visible;  // physical number of each device that CUDA_VISIBLE_DEVICES leaves
std::vector<DeviceContext *> contexts;
std::vector<size_t> used;  // bytes per visible device
std::vector<std::unique_ptr<DeviceContext>> primaries;
std::vector<unsigned> primary_flags;
std::vector<std::string> leaks;
std::mt19937_64 stream_random;
unsigned stream_counter = 0;
thread_local std::vector<DeviceContext *> stack;

CUuuid device_uuid(int physical) {
    CUuuid result;
    uint64_t state = 0xD17A1247u + static_cast<uint64_t>(physical);
    for (char &byte : result.bytes) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        byte = static_cast<char>(state >> 56);
    }
    return result;
}

std::string uuid_text(const CUuuid &uuid) {
    std::string result = options().slices ? "MIG-" : "GPU-";
    for (int i = 0; i < 16; ++i) {
        if (i == 4 || i == 6 || i == 8 || i == 10) result += '-';
        result += text("%02x", static_cast<unsigned char>(uuid.bytes[i]));
    }
    return result;
}

// The rules of the real driver: indices or UUID prefixes; the list ends at the first that names no device; a device
// named twice makes the list empty.
std::vector<int> visible_devices() {
    std::vector<int> result;
    int count = static_cast<int>(options().devices);
    const char *mask = getenv("CUDA_VISIBLE_DEVICES");
    if (!mask) {
        for (int i = 0; i < (options().slices ? 1 : count); ++i) result.push_back(i);
        return result;
    }
    std::string list = mask;
    for (size_t at = 0; at <= list.size();) {
        size_t end = std::min(list.find(',', at), list.size());
        std::string item = list.substr(at, end - at);
        at = end + 1;
        item.erase(0, item.find_first_not_of(' '));
        int found = -1;
        if (item.rfind(options().slices ? "MIG-" : "GPU-", 0) == 0) {
            for (int i = 0; i < count; ++i)
                if (uuid_text(device_uuid(i)).rfind(item, 0) == 0) found = found == -1 ? i : -2;
        } else if (!item.empty() && isdigit(static_cast<unsigned char>(item[0]))) {
            char *rest;
            long n = strtol(item.c_str(), &rest, 10);
            if (n >= 0 && n < count && *rest == 0) found = static_cast<int>(n);
        }
        if (found < 0) break;
        if (options().slices && !result.empty()) break;  // a process sees one slice, however many are named
        if (std::find(result.begin(), result.end(), found) != result.end()) return {};
        result.push_back(found);
    }
    return result;
}

bool valid_device(CUdevice device) { return device >= 0 && device < static_cast<int>(visible.size()); }
bool known(const DeviceContext *context) {
    return std::find(contexts.begin(), contexts.end(), context) != contexts.end();
}

}  // namespace

DeviceContext *current() { return stack.empty() ? nullptr : stack.back(); }

// ---------------------------------------------------------------- queued work

std::vector<Stream *> all_streams(DeviceContext *only) {
    std::vector<Stream *> result;
    for (DeviceContext *context : contexts) {
        if (only && context != only) continue;
        result.push_back(&context->null_stream);
        for (auto &stream : context->streams) result.push_back(stream.get());
    }
    return result;
}

const Operation *running_operation = nullptr;

namespace {
Clock waited;  // what the host has waited for

void merge(Clock &into, const Clock &other) {
    for (auto [stream, number] : other) into[stream] = std::max(into[stream], number);
}

void merge(Clock &into, const std::shared_ptr<Operation> &operation) {
    if (operation) merge(into, operation->clock);
}

// Gives an operation that is being queued its place in the order of all that happens.
void place(Stream &stream, Operation &operation) {
    static unsigned streams = 0;
    if (!stream.identity) stream.identity = ++streams;
    merge(operation.clock, waited);
    merge(operation.clock, stream.last);
    for (auto &other : stream.waits) merge(operation.clock, other);
    DeviceContext &context = *stream.context;
    if (&stream == &context.null_stream) {
        for (auto &other : context.streams)
            if (!other->non_blocking) merge(operation.clock, other->last);
    } else if (!stream.non_blocking) {
        merge(operation.clock, context.null_stream.last);
    }
    operation.number = operation.clock[stream.identity] = ++stream.issued;
}

void run_operation(Operation &operation) {
    for (auto &part : operation.parts)
        if (!part->done) run_operation(*part);
    running_operation = &operation;
    DeviceContext *context = operation.stream->context;
    operation.start = now();
    if (operation.run && context->error == CUDA_SUCCESS) {
        CUresult result = operation.run(*operation.stream);
        if (result != CUDA_SUCCESS) context->error = result;
    }
    operation.end = now();
    running_operation = nullptr;
    operation.run = nullptr;
    operation.after.clear();
    operation.parts.clear();
    operation.done = true;
}

bool is_able(const Operation &operation) {
    return std::all_of(operation.after.begin(), operation.after.end(), [](auto &o) { return o->done; });
}

// Runs one operation that may legally run now, chosen at random. False when nothing is queued.
bool step() {
    std::vector<std::shared_ptr<Operation>> able;
    for (Stream *stream : all_streams()) {
        if (stream->queue.empty() || !is_able(*stream->queue.front())) continue;
        auto &first = stream->queue.front();
        bool complete = true;
        for (auto &part : first->parts) {
            complete = complete && part->done;
            if (!part->done && is_able(*part)) able.push_back(part);
        }
        if (complete) able.push_back(first);
    }
    if (able.empty()) return false;
    auto operation = able[stream_random() % able.size()];
    auto &queue = operation->stream->queue;
    if (queue.front() == operation) queue.pop_front();
    run_operation(*operation);
    return true;
}

template <class Condition>
void run_until(Condition reached) {
    while (!reached() && step()) {
    }
}

void finish_everything() {
    run_until([] { return false; });
    for (Stream *stream : all_streams()) merge(waited, stream->last);
}

}  // namespace

void queue(Stream &stream, const std::shared_ptr<Operation> &operation) {
    DeviceContext &context = *stream.context;
    operation->stream = &stream;
    if (options().check_races) place(stream, *operation);
    stream.last = operation;
    if (!options().random_streams) {
        stream.waits.clear();
        run_operation(*operation);
        return;
    }
    operation->after.insert(operation->after.end(), stream.waits.begin(), stream.waits.end());
    stream.waits.clear();
    // The legacy default stream waits for every blocking stream, and they for it.
    auto wait_for = [&](Stream &other) {
        if (other.last && !other.last->done) operation->after.push_back(other.last);
    };
    if (&stream == &context.null_stream) {
        for (auto &other : context.streams)
            if (!other->non_blocking) wait_for(*other);
    } else if (!stream.non_blocking) {
        wait_for(context.null_stream);
    }
    stream.queue.push_back(operation);
    // The device may already be at work, or far behind.
    while (stream_random() % 3 == 0 && step()) {
    }
}

namespace {
// A stream that captures records the work, and there is no operation.
std::shared_ptr<Operation> enqueue(Stream &stream, CUgraphNodeType type, Work run, Module *module = nullptr) {
    if (stream.capture) {
        record(stream, type, std::move(run), module);
        return nullptr;
    }
    auto operation = std::make_shared<Operation>();
    operation->run = std::move(run);
    queue(stream, operation);
    return operation;
}

CUresult finish(const std::shared_ptr<Operation> &operation) {
    if (operation) run_until([&] { return operation->done; });
    merge(waited, operation);
    return CUDA_SUCCESS;
}

}  // namespace

Stream *find_stream(DeviceContext *context, CUstream handle) {
    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) return &context->null_stream;
    auto *wanted = reinterpret_cast<Stream *>(handle);
    for (DeviceContext *any : contexts)
        for (auto &stream : any->streams)
            if (stream.get() == wanted) return wanted;
    return nullptr;
}

Event *find_event(CUevent handle) {
    for (DeviceContext *context : contexts)
        for (auto &event : context->events)
            if (event.get() == reinterpret_cast<Event *>(handle)) return event.get();
    return nullptr;
}

namespace {

// ---------------------------------------------------------------- copies

bool device_range(const char *function, uintptr_t address, size_t bytes) {
    Allocation *allocation = find_allocation(address);
    if (allocation && allocation->contains(address, bytes)) return true;
    say("%s: %s: %zu bytes at %s", function, find_freed(address) ? "use after free" : "out of bounds", bytes,
        describe_address(address, bytes).c_str());
    return false;
}

// Device memory is checked when work is queued, and lives until that is done: cuMemFree waits. A graph can outlive it.
bool is_gone(const char *function, uintptr_t address, size_t bytes) {
    if (!running_graph || find_allocation(address) || !find_freed(address)) return false;
    say("%s in a graph: use after free: %zu bytes at %s", function, bytes, describe_address(address, bytes).c_str());
    return true;
}

bool is_page_locked(const void *address, size_t bytes) {
    Allocation *allocation = find_allocation(reinterpret_cast<uintptr_t>(address));
    return allocation && allocation->contains(reinterpret_cast<uintptr_t>(address), bytes);
}

void note(const Stream &stream, const std::string &name, const char *category, double start, size_t bytes) {
    trace(name, category, stream.context->device, stream.number, start, now(), text("\"bytes\":%zu", bytes));
}

CUresult copy_now(Stream &stream, const char *name, void *to, const void *from, size_t bytes) {
    double start = now();
    for (const void *place : {static_cast<const void *>(to), from})
        if (is_gone(name, reinterpret_cast<uintptr_t>(place), bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    auto to_address = reinterpret_cast<uintptr_t>(to), from_address = reinterpret_cast<uintptr_t>(from);
    if (CUresult race = check_copy(name, to_address, from_address, bytes)) return race;
    memmove(to, from, bytes);
    copy_written(to_address, from_address, bytes);
    note(stream, name, "memcpy", start, bytes);
    return CUDA_SUCCESS;
}

CUresult copy_to_device(const char *name, Stream &stream, CUdeviceptr to, const void *from, size_t bytes, bool async) {
    if (!bytes) return CUDA_SUCCESS;
    QUEUE(name, stream, !async);
    if (!from || !device_range(name, to, bytes)) return CUDA_ERROR_INVALID_VALUE;
    // A graph reads the memory, of either kind, at each launch.
    if (async && (stream.capture || is_page_locked(from, bytes))) {
        enqueue(stream, CU_GRAPH_NODE_TYPE_MEMCPY,
                [=](Stream &by) { return copy_now(by, name, reinterpret_cast<void *>(to), from, bytes); });
        return CUDA_SUCCESS;
    }
    // Pageable memory is staged: the caller may change it as soon as the call returns.
    auto staged = std::make_shared<std::string>();
    if (options().random_streams) staged->assign(static_cast<const char *>(from), bytes);
    auto operation = enqueue(stream, CU_GRAPH_NODE_TYPE_MEMCPY, [=](Stream &by) {
        return copy_now(by, name, reinterpret_cast<void *>(to), staged->empty() ? from : staged->data(), bytes);
    });
    return async ? CUDA_SUCCESS : finish(operation);
}

CUresult copy_to_host(const char *name, Stream &stream, void *to, CUdeviceptr from, size_t bytes, bool async) {
    if (!bytes) return CUDA_SUCCESS;
    QUEUE(name, stream, !async);
    if (!to || !device_range(name, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
    auto operation = enqueue(stream, CU_GRAPH_NODE_TYPE_MEMCPY, [=](Stream &by) {
        return copy_now(by, name, to, reinterpret_cast<const void *>(from), bytes);
    });
    // A copy to pageable memory returns when it is complete.
    if (!async || !is_page_locked(to, bytes)) finish(operation);
    return stream.context->error;
}

CUresult copy_on_device(const char *name, Stream &stream, CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    if (!bytes) return CUDA_SUCCESS;
    QUEUE(name, stream, false);
    if (!device_range(name, to, bytes) || !device_range(name, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
    enqueue(stream, CU_GRAPH_NODE_TYPE_MEMCPY, [=](Stream &by) {
        return copy_now(by, name, reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes);
    });
    return CUDA_SUCCESS;
}

// pitch == 0: one row of `width` elements.
CUresult set_memory(const char *name, Stream &stream, CUdeviceptr to, size_t pitch, unsigned value, unsigned element,
                    size_t width, size_t height) {
    if (!width || !height) return CUDA_SUCCESS;
    QUEUE(name, stream, false);
    if (to % element) return CUDA_ERROR_INVALID_VALUE;
    size_t row = width * element;
    if (height > 1 && pitch < row) return CUDA_ERROR_INVALID_VALUE;
    if (!device_range(name, to, (height - 1) * pitch + row)) return CUDA_ERROR_INVALID_VALUE;
    enqueue(stream, CU_GRAPH_NODE_TYPE_MEMSET, [=](Stream &by) {
        double start = now();
        if (is_gone(name, to, (height - 1) * pitch + row)) return CUDA_ERROR_ILLEGAL_ADDRESS;
        for (size_t y = 0; y < height; ++y) {
            char *line = reinterpret_cast<char *>(to + y * pitch);
            if (element == 1) {
                memset(line, static_cast<int>(value), row);
            } else {
                for (size_t x = 0; x < row; x += element) memcpy(line + x, &value, element);
            }
            mark_written(to + y * pitch, row);
            if (CUresult race = check_copy(name, to + y * pitch, 0, row)) return race;
        }
        note(by, name, "memset", start, row * height);
        return CUDA_SUCCESS;
    });
    return CUDA_SUCCESS;
}

// A 2-D copy is a 3-D one of depth 1. Rows and slices without a pitch and a height lie without gaps.
CUresult copy_3d(const char *name, Stream &stream, const CUDA_MEMCPY3D &c, bool async) {
    if (!c.WidthInBytes || !c.Height || !c.Depth) return CUDA_SUCCESS;
    QUEUE(name, stream, !async);
    struct Side {
        uintptr_t start = 0;
        size_t pitch = 0, slice = 0;
        uintptr_t row(size_t y, size_t z) const { return start + z * slice + y * pitch; }
    };
    auto side = [&](CUmemorytype type, const void *host, CUdeviceptr device, size_t x, size_t y, size_t z, size_t lod,
                    size_t pitch, size_t height, Side &result) -> CUresult {
        if (type == CU_MEMORYTYPE_ARRAY) {
            say("%s: arrays are not modelled", name);
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        if (lod) return CUDA_ERROR_INVALID_VALUE;
        result.pitch = pitch ? pitch : x + c.WidthInBytes;
        result.slice = (height ? height : y + c.Height) * result.pitch;
        if (result.pitch < x + c.WidthInBytes || (height && height < y + c.Height)) return CUDA_ERROR_INVALID_VALUE;
        result.start = type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uintptr_t>(host) : device;
        result.start = result.row(y, z) + x;
        size_t extent = result.row(c.Height - 1, c.Depth - 1) + c.WidthInBytes - result.start;
        if (type == CU_MEMORYTYPE_DEVICE && !device_range(name, result.start, extent)) return CUDA_ERROR_INVALID_VALUE;
        return CUDA_SUCCESS;
    };
    Side from, to;
    CUresult result = side(c.srcMemoryType, c.srcHost, c.srcDevice, c.srcXInBytes, c.srcY, c.srcZ, c.srcLOD, c.srcPitch,
                           c.srcHeight, from);
    if (result == CUDA_SUCCESS)
        result = side(c.dstMemoryType, c.dstHost, c.dstDevice, c.dstXInBytes, c.dstY, c.dstZ, c.dstLOD, c.dstPitch,
                      c.dstHeight, to);
    if (result != CUDA_SUCCESS) return result;
    size_t width = c.WidthInBytes, height = c.Height, depth = c.Depth;
    auto operation = enqueue(stream, CU_GRAPH_NODE_TYPE_MEMCPY, [=](Stream &by) {
        double start = now();
        for (uintptr_t place : {to.start, from.start})
            if (is_gone(name, place, width)) return CUDA_ERROR_ILLEGAL_ADDRESS;
        for (size_t z = 0; z < depth; ++z)
            for (size_t y = 0; y < height; ++y) {
                memmove(reinterpret_cast<void *>(to.row(y, z)), reinterpret_cast<void *>(from.row(y, z)), width);
                copy_written(to.row(y, z), from.row(y, z), width);
                if (CUresult race = check_copy(name, to.row(y, z), from.row(y, z), width)) return race;
            }
        note(by, name, "memcpy", start, width * height * depth);
        return CUDA_SUCCESS;
    });
    auto waits = [&](CUmemorytype type, const Side &one) {
        return type == CU_MEMORYTYPE_HOST && (!async || !is_page_locked(reinterpret_cast<void *>(one.start), 1));
    };
    if (waits(c.srcMemoryType, from) || waits(c.dstMemoryType, to)) finish(operation);
    return CUDA_SUCCESS;
}

CUresult copy_2d(const char *name, Stream &stream, const CUDA_MEMCPY2D &flat, bool async) {
    CUDA_MEMCPY3D c{};
    c.srcMemoryType = flat.srcMemoryType;
    c.srcHost = flat.srcHost;
    c.srcDevice = flat.srcDevice;
    c.srcXInBytes = flat.srcXInBytes;
    c.srcY = flat.srcY;
    c.srcPitch = flat.srcPitch;
    c.dstMemoryType = flat.dstMemoryType;
    c.dstHost = flat.dstHost;
    c.dstDevice = flat.dstDevice;
    c.dstXInBytes = flat.dstXInBytes;
    c.dstY = flat.dstY;
    c.dstPitch = flat.dstPitch;
    c.WidthInBytes = flat.WidthInBytes;
    c.Height = flat.Height;
    c.Depth = 1;
    return copy_3d(name, stream, c, async);
}

// ---------------------------------------------------------------- launches

unsigned resident_blocks(const Function &function, unsigned threads, size_t dynamic) {
    if (!threads || threads > max_threads) return 0;
    unsigned warps = (threads + warp_size - 1) / warp_size;
    size_t shared = (function.static_shared + dynamic + shared_reserved + 127) / 128 * 128;
    return std::min({max_blocks_per_sm, max_threads_per_sm / (warps * warp_size),
                     static_cast<unsigned>(shared_per_sm / shared)});
}

CUresult refuse(const Function &function, CUresult code, const std::string &why) {
    say("launch of %s refused: %s", function.info.name, why.c_str());
    return code;
}

CUresult gather_arguments(const Function &function, void **parameters, void **extra, std::string &packed) {
    const EmuKernelInfo &info = function.info;
    packed.assign((info.argument_bytes + 15u) & ~15u, '\0');
    if (parameters && info.parameters) {
        for (uint32_t i = 0; i < info.parameters; ++i) {
            if (!parameters[i]) return CUDA_ERROR_INVALID_VALUE;
            memcpy(packed.data() + info.offsets[i], parameters[i], info.sizes[i]);
        }
        return CUDA_SUCCESS;
    }
    const char *buffer = nullptr;
    size_t bytes = 0;
    for (void **entry = extra; entry && *entry != CU_LAUNCH_PARAM_END; entry += 2) {
        if (*entry == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = static_cast<const char *>(entry[1]);
        else if (*entry == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t *>(entry[1]);
        else return CUDA_ERROR_INVALID_VALUE;
    }
    size_t padded = (info.argument_bytes + 7u) & ~7u;
    if (bytes != info.argument_bytes && bytes != padded) {
        std::string sizes;
        for (uint32_t i = 0; i < info.parameters; ++i) sizes += text("%s%u", i ? ", " : "", info.sizes[i]);
        return refuse(function, CUDA_ERROR_INVALID_VALUE,
                      text("wrong argument size: %zu bytes of arguments, the kernel's %u parameters take %u (sizes %s)",
                           bytes, info.parameters, info.argument_bytes, sizes.c_str()));
    }
    if (buffer) memcpy(packed.data(), buffer, std::min<size_t>(bytes, info.argument_bytes));
    return CUDA_SUCCESS;
}

// Warps here are not in lockstep, so such a kernel computes wrong numbers: race mode names the lines, others say this.
bool counts_on_lockstep(const Function &function) {
    if (!function.info.lockstep || options().check_races) return false;
    static std::set<std::string> said;
    if (said.insert(function.symbol).second)
        say("lockstep: kernel %s exchanges values through %s, a volatile pointer to shared memory, without __syncwarp: "
            "it counts on the lanes of a warp running in lockstep, which no GPU since Volta promises; results are wrong "
            "(EMULATOR_SANITIZE=race names the lines, EMULATOR_ON_REPORT=continue runs it)",
            function.info.name, function.info.lockstep);
    return !options().continue_after_report;
}

CUresult queue_launch(Function *function, Launch launch, CUstream handle, void **parameters, void **extra) {
    DeviceContext *context = current();
    Stream *stream = find_stream(context, handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    const EmuKernelInfo &info = function->info;
    if (function->module->context != context || stream->context != context)
        return refuse(*function, CUDA_ERROR_INVALID_HANDLE, "the kernel or the stream belongs to another context");
    QUEUE("cuLaunchKernel", *stream, false);
    if (function->module->checked != options().checked())
        return refuse(*function, CUDA_ERROR_INVALID_IMAGE,
                      "it was compiled under another EMULATOR_SANITIZE; compile it in this run");
    emu_uint3 g = launch.grid, b = launch.block;
    uint64_t threads = uint64_t{b.x} * b.y * b.z;
    if (!g.x || !g.y || !g.z || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535)
        return refuse(*function, CUDA_ERROR_INVALID_VALUE,
                      text("grid (%u,%u,%u) is outside (2147483647,65535,65535)", g.x, g.y, g.z));
    if (!threads || b.x > 1024 || b.y > 1024 || b.z > 64 || threads > max_threads)
        return refuse(*function, CUDA_ERROR_INVALID_VALUE,
                      text("block (%u,%u,%u) is outside (1024,1024,64) or has more than 1024 threads", b.x, b.y, b.z));
    if (info.max_threads && threads > info.max_threads)
        return refuse(*function, CUDA_ERROR_INVALID_VALUE,
                      text("%llu threads, but __launch_bounds__ promised at most %u",
                           static_cast<unsigned long long>(threads), info.max_threads));
    if (launch.dynamic_shared > static_cast<unsigned>(function->max_dynamic_shared))
        return refuse(*function, CUDA_ERROR_INVALID_VALUE,
                      text("%u bytes of static and %u of dynamic shared memory; %d of dynamic are allowed "
                           "(MAX_DYNAMIC_SHARED_SIZE_BYTES raises that to %zu)",
                           function->static_shared, launch.dynamic_shared, function->max_dynamic_shared,
                           shared_optin - function->static_shared));
    if (info.cluster.x && launch.cluster_blocks() > 1 &&
        memcmp(&info.cluster, &launch.cluster, sizeof info.cluster) != 0)
        return refuse(*function, CUDA_ERROR_INVALID_VALUE, "the cluster differs from __cluster_dims__");
    if (info.cluster.x) launch.cluster = info.cluster;
    emu_uint3 c = launch.cluster;
    if (launch.cluster_blocks() > (function->non_portable_cluster ? max_cluster : max_cluster_portable))
        return refuse(*function, CUDA_ERROR_INVALID_CLUSTER_SIZE,
                      text("a cluster of %u blocks; 8 are portable, 16 need NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
                           launch.cluster_blocks()));
    if (g.x % c.x || g.y % c.y || g.z % c.z)
        return refuse(*function, CUDA_ERROR_INVALID_VALUE,
                      text("grid (%u,%u,%u) is not a multiple of the cluster (%u,%u,%u)", g.x, g.y, g.z, c.x, c.y, c.z));
    if (launch.cooperative) {
        uint64_t most = uint64_t{resident_blocks(*function, static_cast<unsigned>(threads), launch.dynamic_shared)} *
                        options().multiprocessors;
        if (launch.blocks() > most)
            return refuse(*function, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
                          text("%llu blocks, of which the device holds %llu at once",
                               static_cast<unsigned long long>(launch.blocks()), static_cast<unsigned long long>(most)));
    }
    CUresult result = gather_arguments(*function, parameters, extra, launch.arguments);
    if (result != CUDA_SUCCESS) return result;
    launch.function = function;
    launch.device = context->device;
    launch.context = context;
    auto shared = std::make_shared<Launch>(std::move(launch));
    auto work = [shared](Stream &by) {
        double start = now();
        CUresult code = counts_on_lockstep(*shared->function) ? CUDA_ERROR_LAUNCH_FAILED : execute(*shared);
        if (!options().trace.empty()) {
            const Launch &l = *shared;
            trace(l.function->info.name, "kernel", l.device, by.number, start, now(),
                  text("\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"cluster\":[%u,%u,%u],\"static_shared\":%u,"
                       "\"dynamic_shared\":%u,\"result\":%d",
                       l.grid.x, l.grid.y, l.grid.z, l.block.x, l.block.y, l.block.z, l.cluster.x, l.cluster.y,
                       l.cluster.z, l.function->static_shared, l.dynamic_shared, static_cast<int>(code)));
        }
        return code;
    };
    enqueue(*stream, CU_GRAPH_NODE_TYPE_KERNEL, std::move(work), function->module);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- contexts

void note_leak(const Allocation &a) {
    if (a.kind == Kind::module_data || a.kind == Kind::registered) return;
    const char *what = a.kind == Kind::pinned ? "pinned host " : "";
    leaks.push_back(text("%zu-byte %sallocation %u of device %d", a.bytes, what, a.number, a.device));
}

void release_of_context(Allocation *allocation) {
    if (allocation->kind == Kind::device || allocation->kind == Kind::managed)
        used[static_cast<size_t>(allocation->device)] -= allocation->bytes;
    release(allocation);
}

// Everything that lives in the context goes with it.
void destroy(DeviceContext *context) {
    run_until([&] {
        auto streams = all_streams(context);
        return std::all_of(streams.begin(), streams.end(), [](Stream *s) { return s->queue.empty(); });
    });
    std::vector<Allocation *> mine;
    for (auto &[base, allocation] : allocations())
        if (allocation->context == context && allocation->kind != Kind::module_data) mine.push_back(allocation.get());
    for (Allocation *allocation : mine) {
        note_leak(*allocation);
        release_of_context(allocation);
    }
    forget(*context);
    for (auto &module : context->modules) {
        forget(*module);
        unload_module(module.release());
    }
    context->modules.clear();
    context->streams.clear();
    context->events.clear();
    contexts.erase(std::find(contexts.begin(), contexts.end(), context));
    stack.erase(std::remove(stack.begin(), stack.end(), context), stack.end());
}

std::unique_ptr<DeviceContext> make_context_on(int device) {
    auto context = std::make_unique<DeviceContext>();
    context->device = device;
    context->null_stream.context = context.get();
    contexts.push_back(context.get());
    return context;
}

std::vector<std::unique_ptr<DeviceContext>> created;  // by cuCtxCreate

void destroy_created(DeviceContext *context) {
    destroy(context);
    context->destroyed = true;  // kept as an empty shell: a late call gets an error, not freed memory
}

void at_exit() {
    if (getpid() != owner) return;  // a forked child owns nothing
    std::lock_guard guard(big_lock());
    finish_everything();
    write_trace();
    for (auto &[base, allocation] : allocations()) note_leak(*allocation);
    for (const std::string &graph : live_graphs()) leaks.push_back(graph);
    if (options().leaks == Options::leaks_off || leaks.empty()) return;
    constexpr size_t shown = 20;
    for (size_t i = 0; i < leaks.size() && i < shown; ++i) say("leak at exit: %s was never freed", leaks[i].c_str());
    if (leaks.size() > shown) say("leak at exit: and %zu more", leaks.size() - shown);
    if (options().leaks == Options::leaks_fail) {
        fflush(nullptr);
        _exit(86);
    }
}
}  // namespace

std::recursive_mutex &big_lock() {
    static auto &lock = *new std::recursive_mutex;
    return lock;
}

}  // namespace emu

using namespace emu;

extern "C" {

// ---------------------------------------------------------------- initialisation and devices

CUresult CUDAAPI cuInit(unsigned flags) {
    LOCK;
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (initialised) return CUDA_SUCCESS;
    visible = visible_devices();
    if (visible.empty()) return CUDA_ERROR_NO_DEVICE;
    used.assign(visible.size(), 0);
    primaries.resize(visible.size());
    primary_flags.assign(visible.size(), 0);
    stream_random.seed(options().seed);
    owner = getpid();
    atexit(at_exit);
    initialised = true;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int *version) {
    NEED(version);
    *version = options().version;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    READY;
    NEED(device);
    if (!valid_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int *count) {
    READY;
    NEED(count);
    *count = static_cast<int>(visible.size());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char *name, int length, CUdevice device) {
    READY;
    NEED(name && length > 0);
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, static_cast<size_t>(length), "Emulated GPU (compute capability %d.%d)%s", options().capability / 10,
             options().capability % 10, options().slices ? " MIG 1g.8gb" : "");
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    READY;
    NEED(uuid);
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *uuid = device_uuid(visible[static_cast<size_t>(device)]);
    return CUDA_SUCCESS;
}

// The first version of cuDeviceGetUuid tells the GPU that a slice is of.
#undef cuDeviceGetUuid
CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    READY;
    NEED(uuid);
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *uuid = device_uuid(options().slices ? -1 : visible[static_cast<size_t>(device)]);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    READY;
    NEED(bytes);
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = options().memory;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    READY;
    NEED(major && minor);
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *major = options().capability / 10;
    *minor = options().capability % 10;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    READY;
    NEED(id && length >= 13);
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(id, static_cast<size_t>(length), "0000:%02X:00.0", visible[static_cast<size_t>(device)] + 1);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice *device, const char *id) {
    READY;
    NEED(device && id);
    for (size_t i = 0; i < visible.size(); ++i)
        if (strcasecmp(id, text("0000:%02X:00.0", visible[i] + 1).c_str()) == 0) {
            *device = static_cast<int>(i);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    READY;
    NEED(value);
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    static const std::map<int, int> values = {
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, max_threads},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, shared_default},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, shared_optin},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, shared_per_sm},
        {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, shared_reserved},
        {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, warp_size},
        {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3201000},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 62914560},
        {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
        {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
        {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
        {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
        {CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT, 0},
        {CU_DEVICE_ATTRIBUTE_INTEGRATED, 0},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
        {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
        {CU_DEVICE_ATTRIBUTE_TCC_DRIVER, 0},
        {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0},
        {CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, max_threads_per_sm},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, max_blocks_per_sm},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, options().capability / 10},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, options().capability % 10},
        {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
        {CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD, 0},
        {CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED, 0},
        {CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2},
        {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 0},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
        {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
        {CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 0},
        {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 0},
        {CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE, 0},
        {CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE, 0},
    };
    if (attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) {
        *value = static_cast<int>(options().multiprocessors);
        return CUDA_SUCCESS;
    }
    if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
        *value = visible[static_cast<size_t>(device)] + 1;
        return CUDA_SUCCESS;
    }
    auto found = values.find(attribute);
    if (found == values.end()) {
        // Textures, virtual memory, tensor maps and the like: known to cuda.h, and not there.
        if (attribute > 0 && attribute < CU_DEVICE_ATTRIBUTE_MAX) {
            *value = 0;
            return CUDA_SUCCESS;
        }
        return CUDA_ERROR_INVALID_VALUE;
    }
    *value = found->second;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    READY;
    NEED(can);
    if (!valid_device(device) || !valid_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- contexts

CUresult CUDAAPI cuCtxCreate_v4(CUcontext *result, CUctxCreateParams *, unsigned flags, CUdevice device) {
    READY;
    NEED(result);
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    created.push_back(make_context_on(device));
    DeviceContext *context = created.back().get();
    context->flags = flags;
    context->users = 1;
    stack.push_back(context);
    *result = reinterpret_cast<CUcontext>(context);
    return CUDA_SUCCESS;
}

#undef cuCtxCreate_v2
CUresult CUDAAPI cuCtxCreate_v2(CUcontext *result, unsigned flags, CUdevice device) {
    return cuCtxCreate_v4(result, nullptr, flags, device);
}

CUresult CUDAAPI cuCtxDestroy(CUcontext handle) {
    READY;
    auto *context = reinterpret_cast<DeviceContext *>(handle);
    if (!known(context) || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
    destroy_created(context);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxAttach(CUcontext *result, unsigned flags) {
    READY;
    NEED(result && !flags);
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    ++current()->users;
    *result = reinterpret_cast<CUcontext>(current());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDetach(CUcontext handle) {
    READY;
    auto *context = reinterpret_cast<DeviceContext *>(handle);
    if (!known(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (context->users && --context->users == 0 && !context->primary) destroy_created(context);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext handle) {
    READY;
    auto *context = reinterpret_cast<DeviceContext *>(handle);
    if (!known(context)) return CUDA_ERROR_INVALID_CONTEXT;
    stack.push_back(context);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *result) {
    READY;
    if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (result) *result = reinterpret_cast<CUcontext>(stack.back());
    stack.pop_back();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext handle) {
    READY;
    if (!stack.empty()) stack.pop_back();
    if (!handle) return CUDA_SUCCESS;
    auto *context = reinterpret_cast<DeviceContext *>(handle);
    if (!known(context)) return CUDA_ERROR_INVALID_CONTEXT;
    stack.push_back(context);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *result) {
    READY;
    NEED(result);
    *result = reinterpret_cast<CUcontext>(current());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice *device) {
    READY;
    NEED(device);
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current()->device;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetApiVersion(CUcontext, unsigned *version) {
    READY;
    NEED(version);
    *version = 3020;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSynchronize(void) {
    CONTEXT;
    if (CUresult code = may_wait_for_context("cuCtxSynchronize", *context)) return code;
    run_until([&] {
        auto streams = all_streams(context);
        return std::all_of(streams.begin(), streams.end(), [](Stream *s) { return s->queue.empty(); });
    });
    for (Stream *stream : all_streams(context)) merge(waited, stream->last);
    return context->error;
}

CUresult CUDAAPI cuCtxGetFlags(unsigned *flags) {
    CONTEXT;
    NEED(flags);
    *flags = context->flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetLimit(size_t *value, CUlimit limit) {
    CONTEXT;
    NEED(value);
    auto found = context->limits.find(limit);
    *value = found != context->limits.end() ? found->second
             : limit == CU_LIMIT_STACK_SIZE  ? 1024
             : limit == CU_LIMIT_PRINTF_FIFO_SIZE ? 7340032
             : limit == CU_LIMIT_MALLOC_HEAP_SIZE ? 8388608
                                                  : 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value) {
    CONTEXT;
    context->limits[limit] = value;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCacheConfig(CUfunc_cache *config) {
    CONTEXT;
    NEED(config);
    *config = CU_FUNC_CACHE_PREFER_NONE;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCacheConfig(CUfunc_cache) {
    CONTEXT;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetSharedMemConfig(CUsharedconfig *config) {
    CONTEXT;
    NEED(config);
    *config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetSharedMemConfig(CUsharedconfig) {
    CONTEXT;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    CONTEXT;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext handle, unsigned flags) {
    CONTEXT;
    auto *peer = reinterpret_cast<DeviceContext *>(handle);
    NEED(!flags);
    if (!known(peer) || peer == context) return CUDA_ERROR_INVALID_CONTEXT;
    if (std::find(context->peers.begin(), context->peers.end(), peer) != context->peers.end())
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    context->peers.push_back(peer);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDisablePeerAccess(CUcontext handle) {
    CONTEXT;
    auto found = std::find(context->peers.begin(), context->peers.end(), reinterpret_cast<DeviceContext *>(handle));
    if (found == context->peers.end()) return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    context->peers.erase(found);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *result, CUdevice device) {
    READY;
    NEED(result);
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    auto &primary = primaries[static_cast<size_t>(device)];
    if (!primary) {
        primary = make_context_on(device);
        primary->primary = true;
        primary->flags = primary_flags[static_cast<size_t>(device)];
    } else if (!known(primary.get())) {
        contexts.push_back(primary.get());  // reset by its last release
        primary->error = CUDA_SUCCESS;
    }
    ++primary->users;
    *result = reinterpret_cast<CUcontext>(primary.get());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
    READY;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    auto &primary = primaries[static_cast<size_t>(device)];
    if (!primary || !primary->users) return CUDA_ERROR_INVALID_CONTEXT;
    if (--primary->users == 0) destroy(primary.get());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice device) {
    READY;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    auto &primary = primaries[static_cast<size_t>(device)];
    if (primary && known(primary.get())) {
        destroy(primary.get());
        primary->users = 0;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
    READY;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    primary_flags[static_cast<size_t>(device)] = flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    READY;
    NEED(flags && active);
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    auto &primary = primaries[static_cast<size_t>(device)];
    *flags = primary_flags[static_cast<size_t>(device)];
    *active = primary && primary->users > 0;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- modules and functions

static CUresult load(CUmodule *result, const void *image, size_t bytes) {
    CONTEXT;
    NEED(result);
    UNSAFE("cuModuleLoad");
    Module *module = nullptr;
    CUresult code = load_module(module, image, bytes, context);
    if (code != CUDA_SUCCESS) return code;
    context->modules.emplace_back(module);
    *result = reinterpret_cast<CUmodule>(module);
    return CUDA_SUCCESS;
}

// Logs of a compiler and a linker: callers read as much of their buffers as the sizes say afterwards.
static void write_logs(unsigned count, CUjit_option *options, void **values, const char *error) {
    char *buffer = nullptr;
    for (unsigned i = 0; i < count; ++i) {
        if (options[i] == CU_JIT_ERROR_LOG_BUFFER) buffer = static_cast<char *>(values[i]);
        if (options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES) values[i] = nullptr;
    }
    for (unsigned i = 0; i < count; ++i) {
        if (options[i] != CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) continue;
        size_t room = reinterpret_cast<size_t>(values[i]), written = buffer ? std::min(room, strlen(error)) : 0;
        if (written) memcpy(buffer, error, written);
        values[i] = reinterpret_cast<void *>(written);
    }
}

CUresult CUDAAPI cuModuleLoadData(CUmodule *result, const void *image) { return load(result, image, 0); }

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *result, const void *image, unsigned count, CUjit_option *options, void **values) {
    write_logs(count, options, values, "");
    return load(result, image, 0);
}

// Linking is not modelled. The log says so.
CUresult CUDAAPI cuLinkCreate(unsigned count, CUjit_option *options, void **values, CUlinkState *) {
    static constexpr char why[] = "the emulator links no modules: it has no dynamic parallelism and no device libraries";
    say("cuLinkCreate: %s", why);
    write_logs(count, options, values, why);
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuModuleLoad(CUmodule *result, const char *name) {
    NEED(name);
    FILE *file = fopen(name, "rb");
    if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
    std::string image;
    char buffer[65536];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, file)) > 0;) image.append(buffer, n);
    fclose(file);
    image.resize(std::max(image.size(), size_t{64}));
    return load(result, image.data(), image.size());
}

// What gives things back succeeds after a fault too, as it does not on a device: PyCUDA writes two lines for each that
// fails, under which the fault's own report would be lost.
CUresult CUDAAPI cuModuleUnload(CUmodule handle) {
    READY;
    DeviceContext *context = current();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    UNSAFE("cuModuleUnload");
    for (auto module = context->modules.begin(); module != context->modules.end(); ++module)
        if (module->get() == reinterpret_cast<Module *>(handle)) {
            finish_everything();
            forget(**module);
            unload_module(module->release());
            context->modules.erase(module);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *result, CUmodule handle, const char *name) {
    CONTEXT;
    NEED(result && name && handle);
    auto *module = reinterpret_cast<Module *>(handle);
    auto found = module->functions.find(name);
    if (found == module->functions.end()) return CUDA_ERROR_NOT_FOUND;
    *result = reinterpret_cast<CUfunction>(found->second.get());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetGlobal(CUdeviceptr *address, size_t *bytes, CUmodule handle, const char *name) {
    CONTEXT;
    NEED(handle && name);
    auto *module = reinterpret_cast<Module *>(handle);
    void *symbol = dlsym(module->handle, name);
    Dl_info info{};
    const ElfW(Sym) *entry = nullptr;
    if (!symbol || module_of_code(symbol) != module ||
        !dladdr1(symbol, &info, reinterpret_cast<void **>(const_cast<ElfW(Sym) **>(&entry)), RTLD_DL_SYMENT) || !entry ||
        ELF64_ST_TYPE(entry->st_info) != STT_OBJECT)
        return CUDA_ERROR_NOT_FOUND;
    if (address) *address = reinterpret_cast<CUdeviceptr>(symbol);
    if (bytes) *bytes = entry->st_size;
    return CUDA_SUCCESS;
}

static Function *as_function(CUfunction handle) { return reinterpret_cast<Function *>(handle); }

CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
    CONTEXT;
    NEED(value && handle);
    const Function &f = *as_function(handle);
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            *value = static_cast<int>(f.info.max_threads ? f.info.max_threads : max_threads);
            break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = static_cast<int>(f.static_shared); break;
        case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
            *value = static_cast<int>(f.module->constant_high - f.module->constant_low);
            break;
        case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = 0; break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = options().capability; break;
        case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: *value = 0; break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = f.max_dynamic_shared; break;
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = f.carveout; break;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET: *value = f.info.cluster.x != 0; break;
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH: *value = static_cast<int>(f.info.cluster.x); break;
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT: *value = static_cast<int>(f.info.cluster.y); break;
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH: *value = static_cast<int>(f.info.cluster.z); break;
        case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: *value = f.non_portable_cluster; break;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: *value = 0; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    CONTEXT;
    NEED(handle);
    Function &f = *as_function(handle);
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            NEED(value >= 0 && f.static_shared + static_cast<size_t>(value) <= shared_optin);
            f.max_dynamic_shared = value;
            break;
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            NEED(value >= -1 && value <= 100);
            f.carveout = value;
            break;
        case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: f.non_portable_cluster = value != 0; break;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache) {
    CONTEXT;
    NEED(handle);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetModule(CUmodule *result, CUfunction handle) {
    CONTEXT;
    NEED(result && handle);
    *result = reinterpret_cast<CUmodule>(as_function(handle)->module);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *bytes) {
    CONTEXT;
    NEED(handle && offset && index < as_function(handle)->info.parameters);
    *offset = as_function(handle)->info.offsets[index];
    if (bytes) *bytes = as_function(handle)->info.sizes[index];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetBlockShape(CUfunction handle, int x, int y, int z) {
    CONTEXT;
    NEED(handle && x > 0 && y > 0 && z > 0);
    // Refused here already by a real driver; PyCUDA's Function.__call__ passes through.
    if (x > 1024 || y > 1024 || z > 64 || int64_t{x} * y * z > max_threads)
        return refuse(*as_function(handle), CUDA_ERROR_INVALID_VALUE,
                      text("block (%d,%d,%d) is outside (1024,1024,64) or has more than 1024 threads", x, y, z));
    unsigned *block = as_function(handle)->block;
    block[0] = static_cast<unsigned>(x);
    block[1] = static_cast<unsigned>(y);
    block[2] = static_cast<unsigned>(z);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetSharedSize(CUfunction handle, unsigned bytes) {
    CONTEXT;
    NEED(handle);
    as_function(handle)->shared = bytes;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuParamSetSize(CUfunction handle, unsigned bytes) {
    CONTEXT;
    NEED(handle);
    as_function(handle)->parameters.resize(bytes);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuParamSetv(CUfunction handle, int offset, void *value, unsigned bytes) {
    CONTEXT;
    NEED(handle && offset >= 0 && value);
    std::string &all = as_function(handle)->parameters;
    if (all.size() < static_cast<unsigned>(offset) + bytes) all.resize(static_cast<unsigned>(offset) + bytes);
    memcpy(all.data() + offset, value, bytes);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuParamSeti(CUfunction handle, int offset, unsigned value) {
    return cuParamSetv(handle, offset, &value, sizeof value);
}

CUresult CUDAAPI cuParamSetf(CUfunction handle, int offset, float value) {
    return cuParamSetv(handle, offset, &value, sizeof value);
}

CUresult CUDAAPI cuLaunchKernel(CUfunction handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                unsigned bz, unsigned shared, CUstream stream, void **parameters, void **extra) {
    CONTEXT;
    NEED(handle);
    Launch launch;
    launch.grid = {gx, gy, gz};
    launch.block = {bx, by, bz};
    launch.dynamic_shared = shared;
    return queue_launch(as_function(handle), std::move(launch), stream, parameters, extra);
}

CUresult CUDAAPI cuLaunchCooperativeKernel(CUfunction handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                           unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                           void **parameters) {
    CONTEXT;
    NEED(handle);
    Launch launch;
    launch.grid = {gx, gy, gz};
    launch.block = {bx, by, bz};
    launch.dynamic_shared = shared;
    launch.cooperative = true;
    return queue_launch(as_function(handle), std::move(launch), stream, parameters, nullptr);
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction handle, void **parameters, void **extra) {
    CONTEXT;
    NEED(handle && config);
    Launch launch;
    launch.grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
    launch.block = {config->blockDimX, config->blockDimY, config->blockDimZ};
    launch.dynamic_shared = config->sharedMemBytes;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const CUlaunchAttribute &attribute = config->attrs[i];
        if (attribute.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) launch.cooperative = attribute.value.cooperative != 0;
        if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            launch.cluster = {attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z};
    }
    NEED(launch.cluster.x && launch.cluster.y && launch.cluster.z);
    return queue_launch(as_function(handle), std::move(launch), config->hStream, parameters, extra);
}

static CUresult launch_legacy(CUfunction handle, unsigned gx, unsigned gy, CUstream stream) {
    CONTEXT;
    NEED(handle);
    Function &f = *as_function(handle);
    Launch launch;
    launch.grid = {gx, gy, 1};
    launch.block = {f.block[0], f.block[1], f.block[2]};
    launch.dynamic_shared = f.shared;
    size_t bytes = f.parameters.size();
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, f.parameters.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                     CU_LAUNCH_PARAM_END};
    return queue_launch(&f, std::move(launch), stream, nullptr, extra);
}

CUresult CUDAAPI cuLaunch(CUfunction handle) { return launch_legacy(handle, 1, 1, nullptr); }

CUresult CUDAAPI cuLaunchGrid(CUfunction handle, int gx, int gy) {
    return launch_legacy(handle, static_cast<unsigned>(gx), static_cast<unsigned>(gy), nullptr);
}

CUresult CUDAAPI cuLaunchGridAsync(CUfunction handle, int gx, int gy, CUstream stream) {
    return launch_legacy(handle, static_cast<unsigned>(gx), static_cast<unsigned>(gy), stream);
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction handle, int threads,
                                                             size_t dynamic) {
    CONTEXT;
    NEED(blocks && handle && threads > 0);
    *blocks = static_cast<int>(resident_blocks(*as_function(handle), static_cast<unsigned>(threads), dynamic));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction handle, int threads,
                                                                      size_t dynamic, unsigned) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, handle, threads, dynamic);
}

CUresult CUDAAPI cuOccupancyMaxActiveClusters(int *clusters, CUfunction handle, const CUlaunchConfig *config) {
    CONTEXT;
    NEED(clusters && handle && config);
    emu_uint3 c = as_function(handle)->info.cluster;
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            c = {config->attrs[i].value.clusterDim.x, config->attrs[i].value.clusterDim.y,
                 config->attrs[i].value.clusterDim.z};
    unsigned size = std::max(1u, c.x * c.y * c.z);
    unsigned blocks = resident_blocks(*as_function(handle), config->blockDimX * config->blockDimY * config->blockDimZ,
                                      config->sharedMemBytes);
    *clusters = static_cast<int>(blocks * options().multiprocessors / size);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- memory

static CUresult allocate_device(CUdeviceptr *result, size_t bytes, Kind kind) {
    CONTEXT;
    NEED(result && bytes);
    UNSAFE("cuMemAlloc");
    size_t &in_use = used[static_cast<size_t>(context->device)];
    if (bytes > options().memory || in_use > options().memory - bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    Allocation *allocation = allocate(kind, bytes, context, context->device);
    if (!allocation) return CUDA_ERROR_OUT_OF_MEMORY;
    in_use += bytes;
    *result = allocation->base;
    note(context->null_stream, "cuMemAlloc", "memory", now(), bytes);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr *result, size_t bytes) {
    return allocate_device(result, bytes, Kind::device);
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *result, size_t bytes, unsigned flags) {
    NEED(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST);
    return allocate_device(result, bytes, Kind::managed);
}

CUresult CUDAAPI cuMemAllocPitch(CUdeviceptr *result, size_t *pitch, size_t width, size_t height, unsigned element) {
    NEED(pitch && width && height && (element == 4 || element == 8 || element == 16));
    *pitch = (width + 511) / 512 * 512;
    return allocate_device(result, *pitch * height, Kind::device);
}

CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
    READY;
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    if (!address) return CUDA_SUCCESS;
    UNSAFE("cuMemFree");
    Allocation *allocation = find_allocation(address);
    if (!allocation || allocation->base != address ||
        (allocation->kind != Kind::device && allocation->kind != Kind::managed)) {
        say("cuMemFree: %s", describe_address(address, 1).c_str());
        return CUDA_ERROR_INVALID_VALUE;
    }
    finish_everything();  // freeing waits for the device
    DeviceContext *context = allocation->context;
    note(context->null_stream, "cuMemFree", "memory", now(), allocation->bytes);
    used[static_cast<size_t>(allocation->device)] -= allocation->bytes;
    if (!release(allocation) && context->error == CUDA_SUCCESS) context->error = CUDA_ERROR_ILLEGAL_ADDRESS;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *result, size_t bytes, CUstream handle) {
    STREAM(handle);
    NOT_CAPTURED("cuMemAllocAsync");
    return cuMemAlloc(result, bytes);
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    STREAM(handle);
    NOT_CAPTURED("cuMemFreeAsync");
    return cuMemFree(address);
}

CUresult CUDAAPI cuMemGetInfo(size_t *free_bytes, size_t *total) {
    CONTEXT;
    if (free_bytes) *free_bytes = options().memory - used[static_cast<size_t>(context->device)];
    if (total) *total = options().memory;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    CONTEXT;
    Allocation *allocation = find_allocation(address);
    if (!allocation) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = allocation->base;
    if (bytes) *bytes = allocation->bytes;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostAlloc(void **result, size_t bytes, unsigned flags) {
    CONTEXT;
    NEED(result && bytes && flags < 8);
    UNSAFE("cuMemHostAlloc");
    Allocation *allocation = allocate(Kind::pinned, bytes, context, context->device);
    if (!allocation) return CUDA_ERROR_OUT_OF_MEMORY;
    allocation->flags = flags | CU_MEMHOSTALLOC_DEVICEMAP;
    *result = reinterpret_cast<void *>(allocation->base);
    note(context->null_stream, "cuMemHostAlloc", "memory", now(), bytes);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocHost(void **result, size_t bytes) { return cuMemHostAlloc(result, bytes, 0); }

CUresult CUDAAPI cuMemFreeHost(void *address) {
    READY;
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    Allocation *allocation = find_allocation(reinterpret_cast<uintptr_t>(address));
    NEED(allocation && allocation->base == reinterpret_cast<uintptr_t>(address) && allocation->kind == Kind::pinned);
    UNSAFE("cuMemFreeHost");
    finish_everything();
    note(allocation->context->null_stream, "cuMemFreeHost", "memory", now(), allocation->bytes);
    release(allocation);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostRegister(void *address, size_t bytes, unsigned flags) {
    CONTEXT;
    NEED(address && bytes);
    UNSAFE("cuMemHostRegister");
    auto low = reinterpret_cast<uintptr_t>(address);
    for (auto &[base, other] : allocations())
        if (base < low + bytes && low < base + other->bytes) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    Allocation *allocation = adopt(Kind::registered, address, bytes, context, context->device);
    allocation->flags = flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostUnregister(void *address) {
    READY;
    Allocation *allocation = find_allocation(reinterpret_cast<uintptr_t>(address));
    if (!allocation || allocation->kind != Kind::registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    UNSAFE("cuMemHostUnregister");
    finish_everything();
    release(allocation);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr *result, void *address, unsigned flags) {
    CONTEXT;
    NEED(result && !flags && is_page_locked(address, 1));
    *result = reinterpret_cast<CUdeviceptr>(address);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostGetFlags(unsigned *flags, void *address) {
    CONTEXT;
    Allocation *allocation = find_allocation(reinterpret_cast<uintptr_t>(address));
    NEED(flags && allocation && allocation->kind == Kind::pinned);
    *flags = allocation->flags;
    return CUDA_SUCCESS;
}

static CUresult pointer_attribute(void *out, CUpointer_attribute attribute, Allocation &a) {
    bool host = a.kind == Kind::pinned || a.kind == Kind::registered;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<void **>(out) = a.context; break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned *>(out) = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int *>(out) = a.device; break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<unsigned *>(out) = a.kind == Kind::managed; break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *static_cast<CUdeviceptr *>(out) = a.base; break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *static_cast<size_t *>(out) = a.bytes; break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID: *static_cast<unsigned long long *>(out) = a.number; break;
        case CU_POINTER_ATTRIBUTE_MAPPED: *static_cast<unsigned *>(out) = 1; break;
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
    READY;
    Allocation *allocation = find_allocation(address);
    NEED(out && allocation);
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER) {
        *static_cast<CUdeviceptr *>(out) = address;
        return CUDA_SUCCESS;
    }
    return pointer_attribute(out, attribute, *allocation);
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned count, CUpointer_attribute *wanted, void **out, CUdeviceptr address) {
    READY;
    NEED(wanted && out);
    Allocation *allocation = find_allocation(address);
    for (unsigned i = 0; i < count; ++i) {
        if (!allocation) {  // ordinary host memory: success, zeros
            if (wanted[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE || wanted[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED)
                *static_cast<unsigned *>(out[i]) = 0;
            continue;
        }
        CUresult code = cuPointerGetAttribute(out[i], wanted[i], address);
        if (code != CUDA_SUCCESS) return code;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    CONTEXT;
    CUresult code = copy_to_device("cuMemcpyHtoD", context->null_stream, to, from, bytes, false);
    return code != CUDA_SUCCESS ? code : context->error;
}
CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream handle) {
    STREAM(handle);
    return copy_to_device("cuMemcpyHtoDAsync", *stream, to, from, bytes, true);
}
CUresult CUDAAPI cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    CONTEXT;
    return copy_to_host("cuMemcpyDtoH", context->null_stream, to, from, bytes, false);
}
CUresult CUDAAPI cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream handle) {
    STREAM(handle);
    return copy_to_host("cuMemcpyDtoHAsync", *stream, to, from, bytes, true);
}
CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    CONTEXT;
    return copy_on_device("cuMemcpyDtoD", context->null_stream, to, from, bytes);
}
CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
    STREAM(handle);
    return copy_on_device("cuMemcpyDtoDAsync", *stream, to, from, bytes);
}
CUresult CUDAAPI cuMemcpyPeer(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes) {
    CONTEXT;
    return copy_on_device("cuMemcpyPeer", context->null_stream, to, from, bytes);
}
CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes,
                                   CUstream handle) {
    STREAM(handle);
    return copy_on_device("cuMemcpyPeerAsync", *stream, to, from, bytes);
}
static CUresult copy_any(const char *name, Stream &stream, CUdeviceptr to, CUdeviceptr from, size_t bytes, bool async) {
    bool to_device = find_allocation(to) != nullptr, from_device = find_allocation(from) != nullptr;
    if (to_device && from_device) return copy_on_device(name, stream, to, from, bytes);
    if (to_device) return copy_to_device(name, stream, to, reinterpret_cast<const void *>(from), bytes, async);
    if (from_device) return copy_to_host(name, stream, reinterpret_cast<void *>(to), from, bytes, async);
    return CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    CONTEXT;
    return copy_any("cuMemcpy", context->null_stream, to, from, bytes, false);
}
CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
    STREAM(handle);
    return copy_any("cuMemcpyAsync", *stream, to, from, bytes, true);
}
CUresult CUDAAPI cuMemcpy2D(const CUDA_MEMCPY2D *copy) {
    CONTEXT;
    NEED(copy);
    return copy_2d("cuMemcpy2D", context->null_stream, *copy, false);
}
CUresult CUDAAPI cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *copy) {
    CONTEXT;
    NEED(copy);
    return copy_2d("cuMemcpy2DUnaligned", context->null_stream, *copy, false);
}
CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D *copy, CUstream handle) {
    STREAM(handle);
    NEED(copy);
    return copy_2d("cuMemcpy2DAsync", *stream, *copy, true);
}

CUresult CUDAAPI cuMemcpy3D(const CUDA_MEMCPY3D *copy) {
    CONTEXT;
    NEED(copy);
    return copy_3d("cuMemcpy3D", context->null_stream, *copy, false);
}
CUresult CUDAAPI cuMemcpy3DAsync(const CUDA_MEMCPY3D *copy, CUstream handle) {
    STREAM(handle);
    NEED(copy);
    return copy_3d("cuMemcpy3DAsync", *stream, *copy, true);
}

CUresult CUDAAPI cuMemsetD8(CUdeviceptr to, unsigned char value, size_t n) {
    CONTEXT;
    return set_memory("cuMemsetD8", context->null_stream, to, 0, value, 1, n, 1);
}
CUresult CUDAAPI cuMemsetD16(CUdeviceptr to, unsigned short value, size_t n) {
    CONTEXT;
    return set_memory("cuMemsetD16", context->null_stream, to, 0, value, 2, n, 1);
}
CUresult CUDAAPI cuMemsetD32(CUdeviceptr to, unsigned value, size_t n) {
    CONTEXT;
    return set_memory("cuMemsetD32", context->null_stream, to, 0, value, 4, n, 1);
}
CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream handle) {
    STREAM(handle);
    return set_memory("cuMemsetD8Async", *stream, to, 0, value, 1, n, 1);
}
CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t n, CUstream handle) {
    STREAM(handle);
    return set_memory("cuMemsetD16Async", *stream, to, 0, value, 2, n, 1);
}
CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t n, CUstream handle) {
    STREAM(handle);
    return set_memory("cuMemsetD32Async", *stream, to, 0, value, 4, n, 1);
}
CUresult CUDAAPI cuMemsetD2D8(CUdeviceptr to, size_t pitch, unsigned char value, size_t w, size_t h) {
    CONTEXT;
    return set_memory("cuMemsetD2D8", context->null_stream, to, pitch, value, 1, w, h);
}
CUresult CUDAAPI cuMemsetD2D16(CUdeviceptr to, size_t pitch, unsigned short value, size_t w, size_t h) {
    CONTEXT;
    return set_memory("cuMemsetD2D16", context->null_stream, to, pitch, value, 2, w, h);
}
CUresult CUDAAPI cuMemsetD2D32(CUdeviceptr to, size_t pitch, unsigned value, size_t w, size_t h) {
    CONTEXT;
    return set_memory("cuMemsetD2D32", context->null_stream, to, pitch, value, 4, w, h);
}
CUresult CUDAAPI cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t w, size_t h,
                                   CUstream handle) {
    STREAM(handle);
    return set_memory("cuMemsetD2D8Async", *stream, to, pitch, value, 1, w, h);
}
CUresult CUDAAPI cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t w, size_t h,
                                    CUstream handle) {
    STREAM(handle);
    return set_memory("cuMemsetD2D16Async", *stream, to, pitch, value, 2, w, h);
}
CUresult CUDAAPI cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned value, size_t w, size_t h,
                                    CUstream handle) {
    STREAM(handle);
    return set_memory("cuMemsetD2D32Async", *stream, to, pitch, value, 4, w, h);
}

// ---------------------------------------------------------------- streams and events

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *result, unsigned flags, int priority) {
    CONTEXT;
    NEED(result && (flags == CU_STREAM_DEFAULT || flags == CU_STREAM_NON_BLOCKING));
    auto stream = std::make_unique<Stream>();
    stream->context = context;
    stream->number = ++stream_counter;
    stream->non_blocking = flags == CU_STREAM_NON_BLOCKING;
    stream->priority = std::clamp(priority, -5, 0);
    *result = reinterpret_cast<CUstream>(stream.get());
    context->streams.push_back(std::move(stream));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamCreate(CUstream *result, unsigned flags) {
    return cuStreamCreateWithPriority(result, flags, 0);
}

CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
    READY;
    Stream *stream = current() && handle ? find_stream(current(), handle) : nullptr;
    if (!stream || stream == &current()->null_stream) return CUDA_ERROR_INVALID_HANDLE;
    NOT_CAPTURED("cuStreamDestroy");
    run_until([&] { return stream->queue.empty(); });
    auto &streams = stream->context->streams;
    streams.erase(std::find_if(streams.begin(), streams.end(), [&](auto &s) { return s.get() == stream; }));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
    STREAM(handle);
    QUEUE("cuStreamSynchronize", *stream, true);
    // The default stream's last operation may be long done while blocking streams it would wait for are not.
    bool is_default = stream == &context->null_stream;
    run_until([&] {
        return stream->queue.empty() &&
               (!is_default || std::all_of(context->streams.begin(), context->streams.end(),
                                           [](auto &s) { return s->non_blocking || s->queue.empty(); }));
    });
    merge(waited, stream->last);
    for (auto &other : context->streams)
        if (is_default && !other->non_blocking) merge(waited, other->last);
    return context->error;
}

CUresult CUDAAPI cuStreamQuery(CUstream handle) {
    STREAM(handle);
    QUEUE("cuStreamQuery", *stream, true);
    if (!stream->queue.empty()) step();  // time passes
    if (!stream->queue.empty()) return CUDA_ERROR_NOT_READY;
    merge(waited, stream->last);
    return context->error;
}

CUresult CUDAAPI cuStreamGetFlags(CUstream handle, unsigned *flags) {
    STREAM(handle);
    NEED(flags);
    *flags = stream->non_blocking ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetPriority(CUstream handle, int *priority) {
    STREAM(handle);
    NEED(priority);
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

#undef cuStreamGetCtx
CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext *result) {
    STREAM(handle);
    NEED(result);
    *result = reinterpret_cast<CUcontext>(stream->context);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamAttachMemAsync(CUstream handle, CUdeviceptr address, size_t, unsigned) {
    STREAM(handle);
    NEED(find_allocation(address));
    NOT_CAPTURED("cuStreamAttachMemAsync");
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    STREAM(handle);
    NEED(function);
    QUEUE("cuLaunchHostFunc", *stream, false);
    enqueue(*stream, CU_GRAPH_NODE_TYPE_HOST, [=](Stream &) {
        function(data);
        return CUDA_SUCCESS;
    });
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventCreate(CUevent *result, unsigned flags) {
    CONTEXT;
    NEED(result && flags < 8);
    if (flags & CU_EVENT_INTERPROCESS) {
        say("cuEventCreate: events between processes are not modelled");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    auto event = std::make_unique<Event>();
    event->context = context;
    event->flags = flags;
    *result = reinterpret_cast<CUevent>(event.get());
    context->events.push_back(std::move(event));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventDestroy(CUevent handle) {
    READY;
    Event *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    auto &events = event->context->events;
    events.erase(std::find_if(events.begin(), events.end(), [&](auto &e) { return e.get() == event; }));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecord(CUevent handle, CUstream stream_handle) {
    STREAM(stream_handle);
    Event *event = find_event(handle);
    if (!event || event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
    QUEUE("cuEventRecord", *stream, false);
    event->capture = stream->capture;
    event->tail = stream->tail;
    event->recorded = nullptr;
    if (stream->capture) return CUDA_SUCCESS;
    event->recorded = std::make_shared<Operation>();
    queue(*stream, event->recorded);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecordWithFlags(CUevent handle, CUstream stream_handle, unsigned flags) {
    if (flags & CU_EVENT_RECORD_EXTERNAL) {
        STREAM(stream_handle);
        NOT_CAPTURED("cuEventRecordWithFlags(CU_EVENT_RECORD_EXTERNAL)");
    }
    return cuEventRecord(handle, stream_handle);
}

// An event of a capture marks a place in a graph; nothing was queued that could be waited for.
CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned) {
    STREAM(handle);
    Event *event = find_event(event_handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    QUEUE("cuStreamWaitEvent", *stream, false);
    if (stream->capture || event->capture) return join_capture(*stream, *event);
    if (event->recorded) stream->waits.push_back(event->recorded);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventQuery(CUevent handle) {
    CONTEXT;
    Event *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult code = may_ask_event("cuEventQuery", *event)) return code;
    if (event->recorded && !event->recorded->done) step();  // time passes
    if (event->recorded && !event->recorded->done) return CUDA_ERROR_NOT_READY;
    merge(waited, event->recorded);
    return context->error;
}

CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
    CONTEXT;
    Event *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult code = may_ask_event("cuEventSynchronize", *event)) return code;
    finish(event->recorded);
    return context->error;
}

CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
    CONTEXT;
    Event *start = find_event(start_handle), *end = find_event(end_handle);
    NEED(milliseconds);
    for (Event *event : {start, end})
        if (event && event->capture) return may_ask_event("cuEventElapsedTime", *event);
    if (!start || !end || !start->recorded || !end->recorded) return CUDA_ERROR_INVALID_HANDLE;
    if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
    if (!start->recorded->done || !end->recorded->done) return CUDA_ERROR_NOT_READY;
    *milliseconds = static_cast<float>((end->recorded->end - start->recorded->end) * 1e3);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- errors, profiler, entry points

static const std::map<int, std::pair<const char *, const char *>> &errors() {
    static const std::map<int, std::pair<const char *, const char *>> table = {
#define ROW(code, words) {code, {#code, words}}
        ROW(CUDA_SUCCESS, "no error"),
        ROW(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
        ROW(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
        ROW(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
        ROW(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
        ROW(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
        ROW(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
        ROW(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
        ROW(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
        ROW(CUDA_ERROR_FILE_NOT_FOUND, "file not found"),
        ROW(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
        ROW(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
        ROW(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
        ROW(CUDA_ERROR_NOT_READY, "device not ready"),
        ROW(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
        ROW(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
        ROW(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
        ROW(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
        ROW(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
        ROW(CUDA_ERROR_ASSERT, "device-side assert triggered"),
        ROW(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
        ROW(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
        ROW(CUDA_ERROR_ILLEGAL_INSTRUCTION, "an illegal instruction was encountered"),
        ROW(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
        ROW(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
        ROW(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch"),
        ROW(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
        ROW(CUDA_ERROR_INVALID_CLUSTER_SIZE, "invalid cluster size"),
        ROW(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
        ROW(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
        ROW(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
        ROW(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
        ROW(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
        ROW(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
        ROW(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            "operation would make the legacy stream depend on a capturing blocking stream"),
        ROW(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
        ROW(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
            "attempt to terminate a thread-local capture sequence from another thread"),
        ROW(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
            "the graph update was not performed because it included changes which violated constraints"),
#undef ROW
    };
    return table;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **result) {
    auto found = errors().find(error);
    *result = found == errors().end() ? nullptr : found->second.second;
    return *result ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **result) {
    auto found = errors().find(error);
    *result = found == errors().end() ? nullptr : found->second.first;
    return *result ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Matrices of 2-byte numbers in the 128-byte swizzle, by the rules of CUDA's driver API.
CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                        const cuuint64_t *size, const cuuint64_t *pitches, const cuuint32_t *box,
                                        const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                        CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    NEED(map && address && size && pitches && box && steps);
    NEED(reinterpret_cast<uintptr_t>(map) % 64 == 0 && reinterpret_cast<uintptr_t>(address) % 16 == 0);
    if (rank != 2 || (type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16) ||
        interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
        fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || box[0] * 2 != 128) {
        fprintf(stderr, "emulator: cuTensorMapEncodeTiled: it knows matrices of 2-byte numbers, swizzled by 128 bytes\n");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    for (unsigned i = 0; i < 2; ++i)
        NEED(size[i] >= 1 && size[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256 && steps[i] == 1);
    NEED(pitches[0] % 16 == 0 && pitches[0] < uint64_t{1} << 40 && pitches[0] >= size[0] * 2);
    EmuTensorMap tile{{}, reinterpret_cast<uint64_t>(address), {size[0], size[1]}, pitches[0], {box[0], box[1]}};
    memcpy(tile.name, emu_tensor_map_name, sizeof tile.name);
    memset(map, 0, sizeof *map);
    memcpy(map, &tile, sizeof tile);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuProfilerInitialize(const char *, const char *, CUoutput_mode) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuProfilerStart(void) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuProfilerStop(void) { return CUDA_SUCCESS; }

// By the version of CUDA that the caller was written for.
static void *find_symbol(const std::string &name, int version) {
    Dl_info info{};
    dladdr(reinterpret_cast<void *>(&cuInit), &info);
    static void *self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    // Functions whose arguments changed; nullptr is what is not here. Of others the newest suffix is meant.
    static const std::map<std::string, std::map<int, const char *>> changed = {
        {"cuCtxCreate", {{3020, "cuCtxCreate_v2"}, {11040, nullptr}, {12050, "cuCtxCreate_v4"}}},
        {"cuCtxGetDevice", {{2000, "cuCtxGetDevice"}, {13000, nullptr}}},
        {"cuCtxSynchronize", {{2000, "cuCtxSynchronize"}, {13000, nullptr}}},
        {"cuDeviceGetUuid", {{9020, "cuDeviceGetUuid"}, {11040, "cuDeviceGetUuid_v2"}}},
        {"cuGetProcAddress", {{11030, nullptr}, {12000, "cuGetProcAddress_v2"}}},
        {"cuGraphExecUpdate", {{10020, nullptr}, {12000, "cuGraphExecUpdate_v2"}}},
        {"cuGraphGetEdges", {{10000, "cuGraphGetEdges"}, {12030, "cuGraphGetEdges_v2"}}},
        {"cuGraphInstantiate", {{10000, "cuGraphInstantiate_v2"}, {12000, "cuGraphInstantiateWithFlags"}}},
        {"cuLaunchHostFunc", {{10000, "cuLaunchHostFunc"}, {13020, nullptr}}},
        {"cuStreamBeginCapture", {{10000, nullptr}, {10010, "cuStreamBeginCapture_v2"}}},
        {"cuStreamGetCaptureInfo",
         {{10010, nullptr}, {11030, "cuStreamGetCaptureInfo_v2"}, {12030, "cuStreamGetCaptureInfo_v3"}}},
        {"cuStreamGetCtx", {{9020, "cuStreamGetCtx"}, {12050, nullptr}}},
    };
    if (auto found = changed.find(name); found != changed.end()) {
        auto later = found->second.upper_bound(version);
        const char *symbol = later == found->second.begin() ? nullptr : std::prev(later)->second;
        return symbol ? dlsym(self, symbol) : nullptr;
    }
    for (const char *suffix : {"_v4", "_v3", "_v2", ""})
        if (void *function = dlsym(self, (name + suffix).c_str())) return function;
    return nullptr;
}

CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t,
                                  CUdriverProcAddressQueryResult *status) {
    NEED(symbol && function);
    *function = find_symbol(symbol, version);
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
