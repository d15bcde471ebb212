// Work in parts, on the threads of `threads.cpp`.

#pragma once

#include <stdint.h>

using Part = void (*)(void *data, int index);

extern "C" void octavo_run_parts(Part part, void *data, int parts);
extern "C" int64_t octavo_threads();  // how many may work on a job

namespace {

// Runs body(0) ... body(threads - 1), on that many threads as far as the system grants them; returns when all have ended.
// Bodies must not wait for each other.
template <class Body>
void on_threads(int threads, Body &body) {
    octavo_run_parts([](void *data, int index) { (*static_cast<Body *>(data))(index); }, &body, threads);
}

}  // namespace
