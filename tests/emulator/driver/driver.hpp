// Shared by the parts of the emulated driver: options, memory, modules, launches, reports.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator/abi.h"
#include "fiber.hpp"

namespace emu {

constexpr size_t page_bytes = 4096;
constexpr unsigned warp_size = 32;

// ---------------------------------------------------------------- options (options.cpp)

enum class Order { forward, reverse, shuffled };

struct Options {
    Order order = Order::forward;
    bool random_streams = false;
    bool check_memory = false;  // bounds, freed and unwritten memory
    bool check_races = false;
    bool continue_after_report = false;
    bool strict_barriers = true;
    enum { leaks_off, leaks_report, leaks_fail } leaks = leaks_report;
    uint64_t seed = 0;
    unsigned threads = 1;
    unsigned devices = 1;
    unsigned multiprocessors = 132;
    size_t memory = size_t{8} << 30;
    size_t stack = 64 * 1024;
    double timeout = 60;
    std::string trace;
    int version = CUDA_VERSION;  // what the driver says of itself
    bool slices = false;         // devices are MIG slices of one GPU
    int capability = 90;         // ten times the compute capability

    bool checked() const { return check_memory || check_races; }
};

const Options &options();

// ---------------------------------------------------------------- reports (report.cpp)

// One line on standard error, "emulator: ...".
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string site_text(const EmuSite &site);
// File and line of an instruction of a loaded module, through addr2line; the innermost frame outside the device
// header.
std::string code_text(const void *pc);

// ---------------------------------------------------------------- memory (memory.cpp)

struct DeviceContext;

enum class Kind { device, managed, pinned, registered, module_data };

// Race records of one 4-byte word; see checks.cpp.
struct RaceCell;

struct Allocation {
    uintptr_t base = 0;
    size_t bytes = 0;
    Kind kind = Kind::device;
    DeviceContext *context = nullptr;
    int device = 0;
    unsigned number = 0;  // the order of allocation, for reports
    char *mapping = nullptr;
    size_t mapping_bytes = 0;
    unsigned flags = 0;
    uint8_t *written = nullptr;  // one byte per byte, checked runs only
    RaceCell *races = nullptr;
    bool contains(uintptr_t address, size_t n) const {
        return address >= base && n <= bytes && address - base <= bytes - n;
    }
};

Allocation *find_allocation(uintptr_t address);           // the live allocation that holds the address
const Allocation *find_freed(uintptr_t address);          // the last freed one that held it
std::string describe_address(uintptr_t address, size_t bytes);  // "16 bytes after the 1024-byte allocation 3"
const std::map<uintptr_t, std::unique_ptr<Allocation>> &allocations();

Allocation *allocate(Kind kind, size_t bytes, DeviceContext *context, int device);
Allocation *adopt(Kind kind, void *base, size_t bytes, DeviceContext *context, int device);
// Returns false after reporting that bytes behind the end of the allocation were written.
bool release(Allocation *allocation);
void mark_written(uintptr_t address, size_t bytes);
void copy_written(uintptr_t to, uintptr_t from, size_t bytes);
void fill_poison(void *to, size_t bytes);
void *reserve(size_t bytes);  // zero pages, given out when touched

// ---------------------------------------------------------------- modules (module.cpp)

struct Module;

struct Function {
    Module *module = nullptr;
    std::string symbol;
    EmuKernelInfo info{};
    unsigned static_shared = 0;
    int max_dynamic_shared = 48 * 1024;
    int carveout = -1;
    int non_portable_cluster = 0;
    // The legacy interface: cuFuncSetBlockShape, cuParamSet*, cuLaunchGrid.
    unsigned block[3] = {1, 1, 1};
    unsigned shared = 0;
    std::string parameters;
};

struct Module {
    DeviceContext *context = nullptr;
    void *handle = nullptr;
    int file = -1;
    std::map<std::string, std::unique_ptr<Function>> functions;
    std::vector<EmuSharedSlot *> slots;
    unsigned static_bytes = 0;  // of all slots together
    uintptr_t code_low = 0, code_high = 0;
    Allocation *data = nullptr;  // its writable variables
    uintptr_t constant_low = 0, constant_high = 0;
    bool checked = false;
};

CUresult load_module(Module *&result, const void *image, size_t bytes, DeviceContext *context);
void unload_module(Module *module);
Module *module_of_code(const void *pc);
Module *module_of_data(uintptr_t address);

// ---------------------------------------------------------------- launches (engine.cpp)

struct Launch {
    Function *function = nullptr;
    emu_uint3 grid{1, 1, 1}, block{1, 1, 1}, cluster{1, 1, 1};
    unsigned dynamic_shared = 0;
    bool cooperative = false;
    std::string arguments;
    int device = 0;
    DeviceContext *context = nullptr;

    unsigned threads_per_block() const { return block.x * block.y * block.z; }
    uint64_t blocks() const { return uint64_t{grid.x} * grid.y * grid.z; }
    unsigned cluster_blocks() const { return cluster.x * cluster.y * cluster.z; }
};

CUresult execute(const Launch &launch);

struct Block;
struct Cluster;
struct Worker;

enum class State : uint8_t { fresh, ready, waiting, finished };

struct AsyncCopy {
    void *to;
    const void *from;
    unsigned bytes, zero_fill;
    const void *pc;
    unsigned group;
};

struct Wgmma;

// Race mode: of each thread of a block, and behind them of each warp's wgmma and each mbarrier's bulk copies, the tick
// before which all that it did comes before what another one does now; block by block of a cluster.
using Seen = std::vector<uint64_t>;

// What a thread has to do with mbarriers, proxies and wgmma (warpgroups.cpp).
struct Warpgroups {
    Seen seen;
    std::vector<uint64_t> proxy_fences;  // ticks
    std::vector<const void *> maps;      // tensor maps in global memory that it has acquired
    struct Pending {
        std::shared_ptr<Wgmma> of;
        unsigned group;
    };
    std::deque<Pending> pending;
    unsigned committed = 0;  // groups
    bool fenced = false;     // wgmma.fence came behind whatever the thread did with registers
    std::vector<float *> registers;  // those that wgmma wrote last,
    uintptr_t low = 0, high = 0;     // between which they are,
    std::vector<float> left;         // and what it left there
};

// A CUDA thread.
struct Fiber : EmuThread {
    Block *block;
    Worker *worker;
    Context context;
    char *stack;
    const char *waits_for;  // what it waits for, for the report of a barrier that not all reach
    EmuSite site;
    int result;  // of a block barrier
    State state;
    uint8_t wait_scope;
    unsigned spins;
    unsigned copy_group;
    std::vector<AsyncCopy> *copies;
    Warpgroups *warpgroups;
};

struct Collective {
    unsigned mask = 0, arrived = 0;
    const char *what = nullptr;
    EmuSite site{};
    void (*combine)(void **, unsigned) = nullptr;
    void *lanes[warp_size];
};

struct Warp {
    unsigned alive = 0;
    std::vector<Collective> pending;
    // Tick of the last barrier that lanes i and j both took part in (race mode).
    std::vector<uint64_t> joined;
};

// A part of a copy by cp.async.bulk.tensor that ends at an mbarrier: lines of 16 bytes or zeros, in the memory of a block.
struct BulkCopy {
    struct Chunk {
        char *to;
        const char *from;  // null: zeros
    };
    std::vector<Chunk> chunks;
    EmuSite site{};
    unsigned bytes() const { return static_cast<unsigned>(chunks.size()) * 16; }
};

// An mbarrier in shared memory.
struct MemoryBarrier {
    unsigned number = 0;                 // among those of its block
    unsigned expected = 0, pending = 0;  // arrivals
    uint64_t bytes = 0;                  // that the running phase waits for
    std::vector<BulkCopy> copies;        // in flight
    uint64_t phase = 0;                  // how many have ended
    std::vector<Fiber *> waiting;
    uint64_t reached = 0, ended_reached = 0;  // by other blocks: in the running phase and the last one
    Seen arriving, ended;  // what comes before the end of the running phase, and came before that of the last one
};

// 128 threads on their way to one wgmma.
struct Meeting {
    unsigned arrived = 0;
    EmuSite site{};
    void *lanes[4 * warp_size];
};

struct Barrier {
    unsigned arrived = 0;
    uint64_t generation = 0;
    uint64_t tick = 0;  // of its last completion
    EmuSite site{};
    int sum = 0;
    bool mixed = false;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    unsigned alive = 0;
    Barrier barrier;
    std::map<unsigned, MemoryBarrier> barriers;  // by their address
    // Race mode: when another block last arrived at one of them, and what arrival of such a block threads waited for.
    uint64_t reached = 0, awaited = 0;
    std::vector<Meeting> meetings;               // by warpgroup
    Cluster *cluster = nullptr;
    uint64_t index = 0;  // in the grid
    char *shared_map = nullptr;
    size_t shared_map_bytes = 0;
    char *shared_low = nullptr, *shared_high = nullptr;
    size_t shared_capacity = 0;
    uint8_t *shared_state = nullptr;
    RaceCell *shared_races = nullptr;
};

struct Cluster {
    std::vector<Block *> blocks;
    unsigned alive = 0;
    Barrier barrier;
};

Worker *current_worker();
// Lets others run until `make_ready` is called for this thread.
void suspend_thread(Fiber &fiber, const char *what, const EmuSite &site);
// Lets threads go on, in the order that EMULATOR_ORDER asks for.
void make_ready(std::vector<Fiber *> threads);
// Ends the launch: a thread waits with others of its group, which are elsewhere.
[[noreturn]] void elsewhere(const Fiber &fiber, const char *what, const EmuSite &site, const char *group, const EmuSite &others);
bool same_site(const EmuSite &a, const EmuSite &b);

// ---------------------------------------------------------------- checks (checks.cpp)

void check_access(const void *address, size_t bytes, EmuAccess kind, const void *pc, bool is_volatile = false);
// Race mode: shared memory that an asynchronous copy may write from now on.
void check_coming_write(const void *shared, size_t bytes, const void *pc);
void begin_checked_launch(const Launch &launch);
// Race mode: what a copy or memset of the running operation does; from or to 0 is no memory of the device's.
CUresult check_copy(const char *name, uintptr_t to, uintptr_t from, size_t bytes);
void begin_checked_block(Block &block, const Module &module, const EmuKernelInfo &info);
void release_checked_block(Block &block);
// An mbarrier's word: as atomics, which a fence makes meet, it is none.
void check_barrier(Block &block, const void *word, EmuAccess kind, const void *pc);
// What a warp's part of a wgmma reads: when it begins, and when it has ended.
void check_wgmma_begins(const Fiber &lane, const void *shared, size_t bytes, const void *pc);
// What a bulk copy that ends at an mbarrier of `block` writes there, from when it begins.
void check_bulk_write(Block &block, unsigned barrier, const void *shared, size_t bytes, const void *pc);
// Race mode: all that the bulk copies of an mbarrier wrote comes before the end of its phase.
void release_copies(const Block &block, MemoryBarrier &barrier);
void check_wgmma_ended(const Fiber &lane, const void *shared, size_t bytes, uint64_t begun, const void *pc);
void note_fence(const Fiber &fiber, bool reaches_other_blocks);
uint64_t next_tick();
uint64_t current_tick();
Seen &seen_by(const Fiber &fiber);
// Adds what comes before what a thread does now, or lets all that comes before what it does from now on.
void release_to(const Fiber &fiber, Seen &into);
void acquire_from(const Fiber &fiber, const Seen &from);
size_t race_cell_bytes();

// Lets a CUDA thread copy at its next wait for the group of copies.
void begin_async_copy(void *shared, const void *global, unsigned bytes, unsigned zero_fill, const void *pc);
// Ends the running launch with this error (from a CUDA thread; does not return).
[[noreturn]] void fail_launch(CUresult code, const std::string &message);
// Is the place one of the registers of a wgmma that the thread has not waited for?
bool is_in_flight(const Fiber &fiber, const void *place);
void forget_warpgroups(Fiber &fiber);
// A thread leaves the kernel.
void check_nothing_in_flight(const Fiber &fiber);
// What a 32-bit address in shared memory points to, in this thread's block.
char *in_shared(unsigned address);
void check_place(const void *place, unsigned bytes, bool shared, const char *what, EmuSite site);
std::string place_in_source(EmuSite site);
float of_bits(uint32_t bits);
float of_half(uint32_t bits);
// Adds a row of `terms` numbers times a matrix (terms, columns) to sums that floats hold, as tensor cores do.
void add_products(double *sums, const double *a, const double *b, unsigned columns, unsigned terms, EmuFactor type);
// Reports a finding of the checks; ends the launch unless EMULATOR_ON_REPORT=continue.
void finding(CUresult code, const std::string &message);
std::string thread_text(const Fiber &fiber);
std::string kernel_name();

// ---------------------------------------------------------------- contexts and streams (state.cpp, api.cpp)

struct Stream;
struct Capture;

// What an operation does; the stream that it runs in is told for the trace.
using Work = std::function<CUresult(Stream &)>;

// What came before: of each stream, by its identity, the number of the last operation.
using Clock = std::map<unsigned, uint64_t>;

struct Operation {
    Work run;
    Clock clock;                // race mode: all that streams, events and the host order before it, and itself
    uint64_t number = 0;        // in its stream
    Operation *whole = nullptr;  // of a node, the graph launch
    size_t node = 0;            // its number there,
    std::vector<bool> behind;   // and the nodes that come before it
    std::vector<std::shared_ptr<Operation>> after;
    std::vector<std::shared_ptr<Operation>> parts;  // the nodes of a graph launch, in one legal order; run comes last
    Stream *stream = nullptr;
    bool done = false;
    double start = 0, end = 0;  // seconds
};

struct Stream {
    DeviceContext *context = nullptr;
    unsigned identity = 0;  // that no other stream ever has
    uint64_t issued = 0;    // operations
    unsigned number = 0;
    bool non_blocking = false;
    int priority = 0;
    std::deque<std::shared_ptr<Operation>> queue;
    std::shared_ptr<Operation> last;
    std::vector<std::shared_ptr<Operation>> waits;  // for the next operation
    std::shared_ptr<Capture> capture;               // that it takes part in
    std::vector<size_t> tail;                       // nodes of it that the next one comes after
};

struct Event {
    DeviceContext *context = nullptr;
    unsigned flags = 0;
    std::shared_ptr<Operation> recorded;
    std::shared_ptr<Capture> capture;  // in which it was last recorded, if it was in one
    std::vector<size_t> tail;          // what it stands for there
};

struct DeviceContext {
    int device = 0;
    bool primary = false;
    bool destroyed = false;
    unsigned users = 0;
    unsigned flags = 0;
    CUresult error = CUDA_SUCCESS;  // sticky, as after a fault on a real device
    Stream null_stream;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::unique_ptr<Event>> events;
    std::vector<std::unique_ptr<Module>> modules;
    std::map<int, size_t> limits;
    std::vector<DeviceContext *> peers;
};

extern const Operation *running_operation;

std::recursive_mutex &big_lock();
double now();

// ---------------------------------------------------------------- trace (report.cpp)

extern unsigned running_graph;  // number of the graph launch whose node runs, 0 outside; in the trace of what runs
void trace(const std::string &name, const char *category, int device, unsigned stream, double start, double end,
           const std::string &arguments_json);
void write_trace();

}  // namespace emu
