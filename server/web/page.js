"use strict";
// Shows /debug/kv every second. The API key, where one is needed, stays in this tab.

const at = (id) => document.getElementById(id);
const say = (id, text) => { at(id).textContent = text; };
const count = (n) => Math.round(n).toLocaleString();
const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

function headers() {
  const key = sessionStorage.getItem("octavo-key");
  return key ? { authorization: "Bearer " + key } : {};
}

function showCommand(model) {
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "What is an octavo?" }] });
  say("curl", `curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '${body}'`);
  say("base", location.origin + "/v1");
}

function showPages(stats, kv) {
  const total = Math.max(stats.pages_total, 1);
  const parts = { shared: stats.pages_shared, active: stats.pages_active - stats.pages_shared, cached: stats.pages_cached };
  for (const [name, pages] of Object.entries(parts)) {
    at("bar-" + name).style.width = (100 * pages / total) + "%";
    say(name, count(pages));
  }
  say("free", count(stats.pages_free));
  say("pool", `${count(kv.total_pages)} pages of ${kv.cache.block_size} tokens, ${(kv.total_bytes / 2 ** 20).toFixed(1)} MiB`);
  say("slots", kv.used_pages ? (100 * kv.slot_utilization).toFixed(1) + " %" : "–");
  const asked = stats.prefix_queries_total;
  say("hits", asked ? `${count(stats.prefix_hits_total)} of ${count(asked)} (${(100 * stats.prefix_hits_total / asked).toFixed(1)} %)` : "none asked yet");
  say("sequences", `${stats.running} / ${stats.waiting}`);
  say("tokens", count(stats.generated_tokens_total));
  say("moves", `${count(stats.copies_total)} / ${count(sum(stats.evictions_total))}, ${count(sum(stats.preemptions_total))}`);
}

function showEvents(events) {
  const rows = events.slice(-12).reverse().map((event) => {
    const row = document.createElement("tr");
    const { kind, ...rest } = event;
    const what = Object.entries(rest).filter(([, value]) => value !== null && value !== "").map(([k, v]) => `${k} ${v}`);
    for (const text of [kind, what.join(", ")]) {
      row.appendChild(document.createElement("td")).textContent = text;
    }
    return row;
  });
  at("events").replaceChildren(...rows);
}

async function refresh() {
  try {
    const answer = await fetch("/debug/kv?events=12", { headers: headers() });
    at("key-form").hidden = answer.status !== 401;
    at("live").hidden = !answer.ok;
    const body = await answer.json();
    if (answer.ok) {
      showCommand(body.model);
      showPages(body.stats, body);
      showEvents(body.events);
      say("state", `${body.model}, ${body.cache.dtype}`);
    } else {
      say("state", answer.status === 401 ? "asks for the API key" : body.error.message);
    }
  } catch {
    at("live").hidden = true;
    say("state", "the server does not answer");
  }
  setTimeout(refresh, 1000);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("octavo-key", at("key").value);
});
showCommand("MODEL");
refresh();
