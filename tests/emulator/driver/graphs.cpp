// Stream capture and CUDA graphs: a capturing stream records its work as nodes of a graph instead of queueing it; a
// launch queues the nodes as the parts of one operation, which run in any order that their edges allow.
#include <algorithm>
#include <set>
#include <thread>

#include "api.hpp"

namespace emu {

struct Node {
    CUgraphNodeType type;
    Work run;        // of a kernel: with the arguments that it had when it was captured; empty once its module is gone
    Module *module;  // of a kernel
    std::vector<size_t> after;
};

struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;  // in the order of capture, so edges lead forwards
};

struct GraphExec {
    std::vector<Node> nodes;
    std::shared_ptr<Operation> last;    // one launch of it waits for the one before
};

struct Capture {
    unsigned long long number = 0;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    std::thread::id thread;
    Stream *origin = nullptr;
    std::unique_ptr<Graph> graph = std::make_unique<Graph>();
    std::vector<CUgraphNode> told;  // what cuStreamGetCaptureInfo pointed to
    std::vector<CUgraphEdgeData> told_edges;
    bool invalid = false, ended = false;
};

namespace {
std::vector<std::unique_ptr<Graph>> graphs;
std::vector<std::unique_ptr<GraphExec>> execs;
std::vector<std::shared_ptr<Capture>> captures;  // that go on
unsigned long long capture_counter = 0;
unsigned launch_counter = 0;
thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

template <class Handle, class Item>
Item *find(const std::vector<std::unique_ptr<Item>> &items, Handle handle) {
    for (auto &item : items)
        if (item.get() == reinterpret_cast<Item *>(handle)) return item.get();
    return nullptr;
}

template <class Handle, class Item>
CUresult erase(std::vector<std::unique_ptr<Item>> &items, Handle handle) {
    Item *item = find(items, handle);
    NEED(item);
    items.erase(std::find_if(items.begin(), items.end(), [&](auto &one) { return one.get() == item; }));
    return CUDA_SUCCESS;
}

// Of a list the caller has room for `count` entries, or asks with a null pointer how many there are; what is beyond
// the end is null, and in the end the count says how many were written.
template <class Item>
void fill(const std::vector<Item> &all, Item *out, size_t *count) {
    if (!out) {
        *count = all.size();
        return;
    }
    for (size_t i = 0; i < *count; ++i) out[i] = i < all.size() ? all[i] : nullptr;
    *count = std::min(*count, all.size());
}

const Graph *any_graph(CUgraph handle) {
    if (Graph *graph = find(graphs, handle)) return graph;
    for (auto &capture : captures)
        if (reinterpret_cast<CUgraph>(capture->graph.get()) == handle) return capture->graph.get();
    return nullptr;
}

CUgraphNode node_handle(const Graph &graph, size_t index) {
    return reinterpret_cast<CUgraphNode>(graph.nodes[index].get());
}

void merge(std::vector<size_t> &tail, const std::vector<size_t> &more) {
    std::set<size_t> all(tail.begin(), tail.end());
    all.insert(more.begin(), more.end());
    tail.assign(all.begin(), all.end());
}

void invalidate(Capture &capture, const char *call, const char *why) {
    if (!capture.invalid)
        say("capture: %s %s; the capture of stream %u is invalid", call, why, capture.origin->number);
    capture.invalid = true;
}

void end(const std::shared_ptr<Capture> &capture) {
    for (Stream *stream : all_streams())
        if (stream->capture == capture) {
            stream->capture = nullptr;
            stream->tail.clear();
        }
    capture->ended = true;
    captures.erase(std::find(captures.begin(), captures.end(), capture));
}

// Captures that use of the legacy stream would wait for.
std::vector<Capture *> blocking_captures(DeviceContext &context) {
    std::vector<Capture *> result;
    for (auto &stream : context.streams)
        if (stream->capture && !stream->non_blocking) result.push_back(stream->capture.get());
    return result;
}

// Whether every node comes before the tail of the stream where the capture began.
bool is_joined(const Capture &capture) {
    std::set<size_t> reached;
    std::vector<size_t> open = capture.origin->tail;
    while (!open.empty()) {
        size_t index = open.back();
        open.pop_back();
        if (!reached.insert(index).second) continue;
        const auto &after = capture.graph->nodes[index]->after;
        open.insert(open.end(), after.begin(), after.end());
    }
    return reached.size() == capture.graph->nodes.size();
}

bool is_stale(const std::vector<Node> &nodes) {
    bool stale = std::any_of(nodes.begin(), nodes.end(), [](const Node &node) { return !node.run; });
    if (stale) say("a kernel of the graph belongs to a module that was unloaded");
    return stale;
}

// What the nodes of one launch know of it.
struct Replay {
    unsigned number;
    double start = 0;
};

Work part_of(const std::shared_ptr<Replay> &replay, const Work &run) {
    return [=](Stream &stream) {
        if (!replay->start) replay->start = now();
        running_graph = replay->number;
        CUresult code = run(stream);
        running_graph = 0;
        return code;
    };
}
}  // namespace

// ---------------------------------------------------------------- the rules of capture

void record(Stream &stream, CUgraphNodeType type, Work run, Module *module) {
    Graph &graph = *stream.capture->graph;
    graph.nodes.push_back(std::make_unique<Node>(Node{type, std::move(run), module, stream.tail}));
    stream.tail = {graph.nodes.size() - 1};
}

CUresult refuse_in_capture(const char *call, Stream &stream) {
    if (stream.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    invalidate(*stream.capture, call, "is not allowed on a stream that captures");
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult may_queue(const char *call, Stream &stream, bool waits) {
    if (stream.capture) {
        if (waits) return refuse_in_capture(call, stream);
        return stream.capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    }
    if (&stream == &stream.context->null_stream) {
        auto blocking = blocking_captures(*stream.context);
        for (Capture *capture : blocking)
            invalidate(*capture, call, "uses the legacy default stream, which waits for every blocking stream");
        if (!blocking.empty()) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    return waits ? may_be_unsafe(call) : CUDA_SUCCESS;
}

CUresult may_be_unsafe(const char *call) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    for (auto &capture : captures) {
        bool conflicts = capture->thread == std::this_thread::get_id()
                             ? capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                             : capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                   thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (!conflicts) continue;
        invalidate(*capture, call, "is allowed during a capture in relaxed mode only");
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return result;
}

CUresult may_wait_for_context(const char *call, DeviceContext &context) {
    CUresult result = CUDA_SUCCESS;
    for (Stream *stream : all_streams(&context))
        if (stream->capture) {
            invalidate(*stream->capture, call, "waits for streams of which one captures");
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return result;
}

CUresult may_ask_event(const char *call, Event &event) {
    if (!event.capture) return may_be_unsafe(call);
    if (!event.capture->ended) invalidate(*event.capture, call, "asks for an event that the capture recorded");
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult join_capture(Stream &stream, Event &event) {
    static constexpr char call[] = "cuStreamWaitEvent";
    if (!event.capture) {
        invalidate(*stream.capture, call, "waits for an event that was recorded outside the capture");
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (event.capture->ended) {
        if (stream.capture) invalidate(*stream.capture, call, "waits for an event of a capture that has ended");
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (event.capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (&stream == &stream.context->null_stream) {
        invalidate(*event.capture, call, "would take the legacy default stream into the capture");
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream.capture && stream.capture != event.capture) {
        for (auto &capture : {stream.capture, event.capture})
            invalidate(*capture, call, "would merge two captures");
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    stream.capture = event.capture;
    merge(stream.tail, event.tail);
    return CUDA_SUCCESS;
}

void forget(DeviceContext &context) {
    for (auto all = captures; auto &capture : all)
        if (capture->origin->context == &context) end(capture);
}

void forget(Module &module) {
    auto drop = [&](Node &node) {
        if (node.module == &module) node.module = nullptr, node.run = nullptr;
    };
    for (auto &graph : graphs) std::for_each(graph->nodes.begin(), graph->nodes.end(), [&](auto &n) { drop(*n); });
    for (auto &capture : captures)
        std::for_each(capture->graph->nodes.begin(), capture->graph->nodes.end(), [&](auto &n) { drop(*n); });
    for (auto &exec : execs) std::for_each(exec->nodes.begin(), exec->nodes.end(), drop);
}

std::vector<std::string> live_graphs() {
    std::vector<std::string> result;
    for (auto &graph : graphs) result.push_back(text("graph of %zu nodes", graph->nodes.size()));
    for (auto &exec : execs) result.push_back(text("executable graph of %zu nodes", exec->nodes.size()));
    return result;
}

}  // namespace emu

using namespace emu;

extern "C" {

// ---------------------------------------------------------------- capture

CUresult CUDAAPI cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    STREAM(handle);
    NEED(mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    if (stream == &context->null_stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->number = ++capture_counter;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    captures.push_back(capture);
    stream->capture = std::move(capture);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph *result) {
    STREAM(handle);
    NEED(result);
    *result = nullptr;
    auto capture = stream->capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (capture->origin != stream) {
        invalidate(*capture, "cuStreamEndCapture", "names another stream than the one where the capture began");
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    CUresult code = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    if (code == CUDA_SUCCESS && !is_joined(*capture)) {
        invalidate(*capture, "cuStreamEndCapture", "finds work of another stream that no event led back");
        code = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    end(capture);
    if (code != CUDA_SUCCESS) return code;
    graphs.push_back(std::move(capture->graph));
    *result = reinterpret_cast<CUgraph>(graphs.back().get());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                        const CUgraphNode **dependencies, const CUgraphEdgeData **edges,
                                        size_t *count) {
    STREAM(handle);
    NEED(status && (dependencies || !edges));
    if (stream == &context->null_stream && !blocking_captures(*context).empty())
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    Capture *capture = stream->capture.get();
    *status = !capture           ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                 : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (!capture) return CUDA_SUCCESS;
    if (capture->invalid) return CUDA_SUCCESS;
    capture->told.clear();
    for (size_t index : stream->tail) capture->told.push_back(node_handle(*capture->graph, index));
    if (id) *id = capture->number;
    if (graph) *graph = reinterpret_cast<CUgraph>(capture->graph.get());
    if (dependencies) *dependencies = capture->told.data();
    capture->told_edges.assign(capture->told.size(), {});
    if (edges) *edges = capture->told_edges.data();
    if (count) *count = capture->told.size();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                           CUgraph *graph, const CUgraphNode **dependencies, size_t *count) {
    return cuStreamGetCaptureInfo(handle, status, id, graph, dependencies, nullptr, count);
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    return cuStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    READY;
    NEED(mode && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- graphs

CUresult CUDAAPI cuGraphCreate(CUgraph *result, unsigned flags) {
    READY;
    NEED(result && !flags);
    graphs.push_back(std::make_unique<Graph>());
    *result = reinterpret_cast<CUgraph>(graphs.back().get());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphDestroy(CUgraph handle) {
    READY;
    return erase(graphs, handle);
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    READY;
    const Graph *graph = any_graph(handle);
    NEED(graph && count);
    std::vector<CUgraphNode> all;
    for (size_t i = 0; i < graph->nodes.size(); ++i) all.push_back(node_handle(*graph, i));
    fill(all, nodes, count);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphGetEdges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data,
                                 size_t *count) {
    READY;
    const Graph *graph = any_graph(handle);
    NEED(graph && count && !from == !to && (from || !data));
    std::vector<CUgraphNode> starts, ends;
    for (size_t i = 0; i < graph->nodes.size(); ++i)
        for (size_t before : graph->nodes[i]->after) {
            starts.push_back(node_handle(*graph, before));
            ends.push_back(node_handle(*graph, i));
        }
    size_t room = *count;
    fill(starts, from, count);
    if (to) fill(ends, to, &room);
    if (data) std::fill_n(data, *count, CUgraphEdgeData{});
    return CUDA_SUCCESS;
}

#undef cuGraphGetEdges
CUresult CUDAAPI cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count) {
    return cuGraphGetEdges_v2(graph, from, to, nullptr, count);
}

CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType *type) {
    READY;
    NEED(handle && type);
    *type = reinterpret_cast<Node *>(handle)->type;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *result, CUgraph handle, unsigned long long flags) {
    CONTEXT;
    Graph *graph = find(graphs, handle);
    NEED(result && graph && flags < 16);
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) {
        say("cuGraphInstantiate: launches from the device are not modelled");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    auto exec = std::make_unique<GraphExec>();
    for (auto &node : graph->nodes) exec->nodes.push_back(*node);
    NEED(!is_stale(exec->nodes));
    *result = reinterpret_cast<CUgraphExec>(exec.get());
    execs.push_back(std::move(exec));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec *result, CUgraph graph, CUgraphNode *bad, char *log, size_t bytes) {
    if (bad) *bad = nullptr;
    if (log && bytes) *log = 0;
    return cuGraphInstantiate(result, graph, 0);
}

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *result, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *how) {
    NEED(how);
    CUresult code = cuGraphInstantiate(result, graph, how->flags);
    how->hErrNode_out = nullptr;
    how->result_out = code == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return code;
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec handle) {
    READY;
    return erase(execs, handle);
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
    STREAM(stream_handle);
    NEED(find(execs, handle));
    NOT_CAPTURED("cuGraphUpload");
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
    STREAM(stream_handle);
    GraphExec *exec = find(execs, handle);
    NEED(exec);
    QUEUE("cuGraphLaunch", *stream, false);
    NOT_CAPTURED("cuGraphLaunch (graphs in graphs are not modelled)");
    NEED(!is_stale(exec->nodes));
    auto replay = std::make_shared<Replay>(Replay{++launch_counter});
    auto launch = std::make_shared<Operation>();
    size_t kernels = 0;
    for (const Node &node : exec->nodes) {
        auto part = std::make_shared<Operation>();
        part->stream = stream;
        part->run = part_of(replay, node.run);
        part->whole = launch.get();
        part->node = launch->parts.size();
        part->behind.assign(exec->nodes.size(), false);
        for (size_t before : node.after) {
            const auto &earlier = launch->parts[before];
            part->after.push_back(earlier);
            part->behind[before] = true;
            for (size_t i = 0; i < part->node; ++i) part->behind[i] = part->behind[i] || earlier->behind[i];
        }
        launch->parts.push_back(std::move(part));
        kernels += node.type == CU_GRAPH_NODE_TYPE_KERNEL;
    }
    std::string facts = text("\"nodes\":%zu,\"kernels\":%zu", exec->nodes.size(), kernels);
    launch->run = part_of(replay, [=](Stream &by) {
        trace("graph launch", "graph", by.context->device, by.number, replay->start, now(), facts);
        return CUDA_SUCCESS;
    });
    if (exec->last && !exec->last->done) launch->after.push_back(exec->last);
    if (exec->last) launch->clock = exec->last->clock;
    exec->last = launch;
    queue(*stream, launch);
    return CUDA_SUCCESS;
}

// The graph must have the nodes and edges that the executable one was made of; what the nodes do may differ.
CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec handle, CUgraph graph_handle, CUgraphExecUpdateResultInfo *info) {
    READY;
    GraphExec *exec = find(execs, handle);
    Graph *graph = find(graphs, graph_handle);
    NEED(exec && graph && info);
    *info = {};
    bool same = exec->nodes.size() == graph->nodes.size();
    for (size_t i = 0; same && i < exec->nodes.size(); ++i) {
        const Node &old = exec->nodes[i], &next = *graph->nodes[i];
        same = old.after == next.after;
        if (same && old.type == next.type) continue;
        info->result = same ? CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        info->errorNode = node_handle(*graph, i);
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
    if (!same) {
        info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
    for (size_t i = 0; i < graph->nodes.size(); ++i) exec->nodes[i] = *graph->nodes[i];
    return CUDA_SUCCESS;
}

}  // extern "C"
