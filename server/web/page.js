"use strict";
// Shows /debug/kv every second while anybody can see it. The API key, where one is needed, stays in this tab.

const at = (id) => document.getElementById(id);
const say = (id, text) => { at(id).textContent = text; };
const count = (n) => Math.round(n).toLocaleString();
const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

const SHOWN = 12;
const FETCHED = 500;

function headers() {
  const key = sessionStorage.getItem("octavo-key");
  return key ? { authorization: "Bearer " + key } : {};
}

function showCommand(model, keyed) {
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "What is an octavo?" }], max_tokens: 64 });
  const key = keyed ? " -H 'Authorization: Bearer KEY'" : "";
  say("curl", `curl ${location.origin}${location.pathname}v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${body}'`);
  say("base", location.origin + location.pathname + "v1");
}

function showPages(kv) {
  const total = Math.max(kv.total_pages, 1);
  const shared = Math.min(kv.shared_pages, kv.used_pages);
  const parts = { shared, used: kv.used_pages - shared, cached: kv.cached_pages };
  for (const [name, pages] of Object.entries(parts)) {
    at("bar-" + name).style.width = (100 * pages / total) + "%";
    say(name, count(pages));
  }
  say("free", count(kv.free_pages));
  say("pool", `${count(kv.total_pages)} pages of ${kv.cache.block_size} tokens`);
  say("memory", (kv.total_bytes / 2 ** 20).toFixed(1) + " MiB");
  say("slots", kv.used_pages ? (100 * kv.slot_utilization).toFixed(1) + " %" : "–");
  const asked = kv.counters.prefix_queries_total;
  const found = kv.counters.prefix_hits_total;
  say("hits", asked ? `${count(found)} of ${count(asked)} (${(100 * found / asked).toFixed(1)} %)` : "none asked yet");
  say("sequences", `${count(kv.active_requests)} / ${count(kv.waiting_requests)}`);
  say("tokens", count(kv.counters.generated_tokens_total));
  say("moves", `${count(kv.counters.copies_total)} / ${count(sum(kv.counters.evictions_total))}`);
  say("preemptions", count(sum(kv.counters.preemptions_total)));
}

// Events of one step, kind and reason are one row: a step in which forty sequences each lose a page is one thing.
function grouped(events) {
  const groups = new Map();
  for (const event of events) {
    if (event.kind === "allocation" && event.reason === "generation") continue;
    const name = [event.step, event.kind, event.reason].join(" ");
    groups.set(name, [...(groups.get(name) ?? []), event]);
  }
  return [...groups.values()].reverse();
}

function amount(name, value) {
  if (name === "blocks") return count(value) + (value === 1 ? " page" : " pages");
  return name === "tokens" ? count(value) + " tokens" : `${name.replaceAll("_", " ")} ${value}`;
}

function described(group) {
  const { step, kind, reason, tenant, request_id: id, ...rest } = group[0];
  const numbers = Object.entries(rest).filter(([, value]) => value !== null);
  if (group.length === 1) {
    return [...(id ? ["request " + id.slice(0, 8)] : []), ...numbers.map(([n, v]) => amount(n, v))].join(", ");
  }
  const sums = numbers.filter(([name]) => name === "tokens" || name === "blocks")
    .map(([name]) => amount(name, group.reduce((all, event) => all + event[name], 0)));
  return [`${group.length} times`, ...sums].join(", ");
}

function showEvents(events) {
  const rows = grouped(events).slice(0, SHOWN).map((group) => {
    const row = document.createElement("tr");
    const { step, kind, reason } = group[0];
    for (const text of [step, `${kind}: ${reason.replaceAll("_", " ")}`, described(group)]) {
      row.appendChild(document.createElement("td")).textContent = text;
    }
    return row;
  });
  at("quiet").hidden = rows.length > 0;
  at("history").hidden = rows.length === 0;
  at("events").replaceChildren(...rows);
}

async function refresh() {
  try {
    const answer = await fetch("debug/kv?events=" + FETCHED, { headers: headers() });
    const body = await answer.json();
    const locked = answer.status === 401;
    at("key-form").hidden = !locked;
    at("live").classList.toggle("stale", !answer.ok);
    if (answer.ok) {
      showCommand(body.model, "authorization" in headers());
      showPages(body);
      showEvents(body.events);
      at("live").hidden = false;
      say("state", `${body.model}, ${body.cache.dtype}`);
    } else {
      if (locked) showCommand("MODEL", true);
      at("live").hidden ||= locked;
      say("state", locked ? "asks for the API key" : body.error.message);
    }
  } catch {
    at("live").classList.add("stale");
    say("state", "the server does not answer");
  }
  if (document.hidden) document.addEventListener("visibilitychange", refresh, { once: true });
  else setTimeout(refresh, 1000);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("octavo-key", at("key").value);
});
showCommand("MODEL", false);
refresh();
