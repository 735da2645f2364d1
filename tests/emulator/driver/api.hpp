// What api.cpp and graphs.cpp share: looking handles up, queueing, and how every call begins.
#pragma once

#include "driver.hpp"

namespace emu {

extern bool initialised;

DeviceContext *current();  // of this thread, or nullptr
Stream *find_stream(DeviceContext *context, CUstream handle);
Event *find_event(CUevent handle);
std::vector<Stream *> all_streams(DeviceContext *only = nullptr);

void queue(Stream &stream, const std::shared_ptr<Operation> &operation);

// ---------------------------------------------------------------- stream capture (graphs.cpp)

// Adds a node to the graph that a capturing stream makes.
void record(Stream &stream, CUgraphNodeType type, Work run, Module *module);

// What the rules of capture say to a call that queues work in the stream and, if it waits, is synchronous. A call that
// they forbid invalidates the captures that it conflicts with.
CUresult may_queue(const char *call, Stream &stream, bool waits);
// To a call that a capture does not see: allocations, synchronisation elsewhere, modules.
CUresult may_be_unsafe(const char *call);
CUresult may_wait_for_context(const char *call, DeviceContext &context);
CUresult may_ask_event(const char *call, Event &event);
CUresult refuse_in_capture(const char *call, Stream &stream);
// cuStreamWaitEvent where the stream or the event is in a capture.
CUresult join_capture(Stream &stream, Event &event);

void forget(DeviceContext &context);  // ends its captures
void forget(Module &module);          // its kernels in graphs cannot be launched any more
std::vector<std::string> live_graphs();  // for the report of leaks

}  // namespace emu

#define LOCK std::lock_guard guard(big_lock())
#define READY                                        \
    LOCK;                                            \
    if (!initialised) return CUDA_ERROR_NOT_INITIALIZED
// After a fault every call on the context repeats its error, as on a real device.
#define CONTEXT                                        \
    READY;                                             \
    DeviceContext *context = current();                \
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;   \
    if (context->error != CUDA_SUCCESS) return context->error
#define NEED(condition) \
    if (!(condition)) return CUDA_ERROR_INVALID_VALUE
#define STREAM(handle)                                    \
    CONTEXT;                                              \
    Stream *stream = find_stream(context, handle);        \
    if (!stream) return CUDA_ERROR_INVALID_HANDLE
#define QUEUE(call, stream, waits) \
    if (CUresult refused = may_queue(call, stream, waits)) return refused
#define UNSAFE(call) \
    if (CUresult refused = may_be_unsafe(call)) return refused
#define NOT_CAPTURED(call) \
    if (stream->capture) return refuse_in_capture(call, *stream)
