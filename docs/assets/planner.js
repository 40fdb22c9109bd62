// The planner's equations for machines in numbers: dense models and mixtures of experts, one token per step, no ranges.
// tests/test_calculator.py compares every figure with the planner's own at random machines; docs/calculator.md says why.
"use strict";

const MOST_SEQUENCES = 1 << 20;
const roundUp = (number) => Math.ceil(number - 1e-9 * Math.abs(number));

// Python's round: halves go to the even number.
function roundEven(value) {
  const below = Math.floor(value), rest = value - below;
  return rest < 0.5 ? below : rest > 0.5 ? below + 1 : below + (below % 2);
}

const polynomial = (factors, x) => factors.reduceRight((sum, each) => sum * x + each, 0);

// The quantile of a standard normal: Wichura's AS241, as Python's NormalDist has it.
function quantile(p) {
  const q = p - 0.5;
  if (Math.abs(q) <= 0.425) {
    const r = 0.180625 - q * q;
    return q * polynomial([3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
      4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3], r) /
      polynomial([1, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
        3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3], r);
  }
  const tail = Math.sqrt(-Math.log(q <= 0 ? p : 1 - p));
  const near = tail <= 5, r = near ? tail - 1.6 : tail - 5;
  const above = near
    ? [1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
      1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4]
    : [6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
      2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7];
  const below = near
    ? [1, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
      1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9]
    : [1, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2, 7.86869131145613259100e-4,
      1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15];
  const found = polynomial(above, r) / polynomial(below, r);
  return q < 0 ? -found : found;
}

// The load of the slowest of so many R-workers over the mean load (perfmodel/load.py).
function barrier(workers, sequencesEach, spread) {
  if (workers <= 1 || sequencesEach <= 0) return 1;
  const most = quantile((workers - 0.375) / (workers + 0.25));
  const slowest = 1 + most * spread / Math.sqrt(Math.max(sequencesEach, 1));
  return sequencesEach <= 1 ? slowest / sequencesEach : Math.max(slowest, Math.ceil(sequencesEach - 1e-9) / sequencesEach);
}

// The largest of 0 … most that meets; doubles, then halves the gap.
function largest(meets, most) {
  let high = 1;
  while (high <= most && meets(high)) high *= 2;
  let low = Math.floor(high / 2);
  high = Math.min(high, most + 1);
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (meets(middle)) low = middle; else high = middle;
  }
  return low;
}

// Bytes of KV per second that cores compute with (perfmodel/hardware.py).
function kernelRate(data, rates, group, cores) {
  const sizes = data.group_sizes, inside = Math.min(group, sizes.at(-1)), x = Math.log(inside);
  let i = 0;
  while (i < sizes.length - 2 && x > Math.log(sizes[i + 1])) i += 1;
  const part = Math.min(Math.max((x - Math.log(sizes[i])) / (Math.log(sizes[i + 1]) - Math.log(sizes[i])), 0), 1);
  return cores * rates[i] ** (1 - part) * rates[i + 1] ** part * 1e9 * inside / group;
}

// One model, machine and workload; every method is the planner's of the same name.
class Live {
  constructor(data, model, gpu, host, seqLen, promptLen, tpotSeconds) {
    const prompt = promptLen, output = seqLen - prompt;
    Object.assign(this, { data, gpu, seqLen, prompt, output, tpot: tpotSeconds });
    this.rowsPer = 1 + prompt / output;
    this.context = prompt + output / 2;
    this.spread = output * Math.sqrt(1 / 12) / this.context;
    this.ranks = Object.keys(model).map(Number).sort((a, b) => a - b)
      .find((count) => model[count].held_bytes <= count * data.memory_fraction * gpu.memory);
    if (!this.ranks) throw new RangeError("no number of these GPUs up to 64 holds the weights");
    const of = this.model = model[this.ranks];
    const perHost = host.holds_gpu ? Math.max(host.r_workers, this.ranks) : host.r_workers;
    const part = Math.min(1, host.r_workers / perHost);
    this.perHost = perHost;
    const cores = Math.max(1, Math.trunc(part * host.cores)), read = part * host.read;
    this.memory = Math.trunc(0.8 * part * host.memory);
    this.capacity = this.memory / of.kv_bytes;
    this.perToken = Math.max(of.token_bytes / read, of.token_bytes / kernelRate(data, data.kernel_rates[of.dtype], of.products, cores));
    this.hops = host.holds_gpu ? [gpu.pcie] : [gpu.pcie, data.link / this.ranks];
    this.latency = host.holds_gpu ? 113e-6 : 159e-6;
    this.rowBytes = of.attending_row_bytes / this.rowsPer + of.appending_row_bytes * (1 - 1 / this.rowsPer);
    this.pool = host.holds_gpu ? Math.max(1, Math.floor(perHost / this.ranks)) : null;
    if (this.capacity < seqLen) throw new RangeError(`one R-worker's memory holds ${Math.trunc(this.capacity)} cached tokens, fewer than one sequence`);
  }

  allReduce(bytes) {
    if (this.ranks === 1) return 0;
    const { peer_rate: rate, peer_step: once } = this.gpu, count = this.ranks;
    return Math.min(2 * (count - 1) * (once + bytes / count / rate), Math.ceil(Math.log2(count)) * (once + bytes / rate));
  }

  gather(bytes) {
    return this.ranks === 1 ? 0 : (this.ranks - 1) * (this.gpu.peer_step + bytes / this.ranks / this.gpu.peer_rate);
  }

  collectives(rows) { return 2 * this.allReduce(rows * this.model.hidden_size * this.model.item_bytes); }

  gathered(rows) { return this.gather(rows * this.model.vocab_size * this.model.item_bytes); }

  layer(rows) {
    const of = this.model;
    return of.layer_bytes / this.gpu.weights + 2 * rows * of.active_layer_parameters / this.gpu.flops + this.collectives(rows);
  }

  head(rows) {
    const of = this.model;
    return of.head_parameters * of.item_bytes / this.gpu.weights + 2 * rows * of.head_parameters / this.gpu.flops + this.gathered(rows);
  }

  bounds(load, workers, k) {
    const each = load.sampled / k / workers;
    const s = this.layer(load.rows / k);
    const r = this.perToken * load.kv * barrier(workers, each, this.spread) / k / workers;
    const trip = this.latency + this.hops.reduce((sum, rate) => sum + load.rows / k * this.rowBytes / rate, 0);
    return { "s-worker": k * (s + trip), "r-workers": k * (r + trip), "round-trip": s + trip + r };
  }

  seconds(load, workers, k) {
    const longest = Math.max(...Object.values(this.bounds(load, workers, k)));
    return this.model.num_layers * longest + k * this.head(load.sampled / k);
  }

  batchTokens(inFlight) {
    const tile = this.data.tile_tokens;
    return Math.max(this.data.chunk_tokens, Math.ceil(inFlight * this.rowsPer / tile) * tile);
  }

  // Sequences that get a token in a step, and the kinds of steps (perfmodel/lab/step_mix.py).
  mix(inFlight) {
    const each = this.rowsPer - 1;
    if (each <= 0) return { decoding: inFlight, kinds: [[1, inFlight]] };
    const budget = this.batchTokens(Math.ceil(inFlight));
    let decoding = inFlight;
    for (let round = 0; round < 3; round += 1)
      decoding = inFlight * this.output / (this.output + Math.max(each * this.output / (budget - decoding) - 0.5, 0));
    const share = Math.min(1, decoding * each / Math.min(budget - decoding, Math.max(1, roundEven(inFlight / 32)) * each * this.output));
    const kinds = [[share, decoding + decoding * each / share]];
    return { decoding, kinds: share < 1 ? [[1 - share, decoding], ...kinds] : kinds };
  }

  stepSeconds(inFlight, workers, k) {
    const { decoding, kinds } = this.mix(inFlight), kv = decoding * this.context;
    return kinds.reduce((sum, [share, rows]) => sum + share * this.seconds({ rows, sampled: decoding, kv }, workers, k), 0);
  }

  firstToken(inFlight, workers, k) {
    const tokens = Math.max(this.prompt, 1), whole = Math.floor(tokens / this.data.chunk_tokens), rest = tokens % this.data.chunk_tokens;
    const kv = inFlight * this.context;
    const step = (rows) => this.seconds({ rows: inFlight + rows, sampled: inFlight, kv }, workers, k);
    const steps = (whole ? whole * step(this.data.chunk_tokens) : 0) + (rest ? step(rest) : 0);
    return steps + this.pairs();
  }

  pairs() { return this.model.pair_operations / (this.ranks * this.gpu.flops) * this.prompt * this.prompt / 2; }

  enough(size) {
    const exact = size * this.context * this.perToken / this.layer(size * this.rowsPer);
    let enough = exact;
    for (let look = 0; look < 2; look += 1)
      enough = exact * Math.min(barrier(enough, size / Math.max(enough, 1), this.spread), 1.5);
    return enough;
  }

  peak(inFlight) {
    const wanted = Math.max(1, roundEven(inFlight / 32));
    const interval = Math.max(1, roundEven(this.output * wanted / inFlight));
    return roundUp(Math.max(inFlight * (this.prompt + (this.output + interval) / 2), this.seqLen));
  }

  memoryWorkers(inFlight) { return Math.max(roundUp(this.peak(inFlight) / this.capacity), 1); }

  candidate(size, workers, k) {
    const inFlight = size * k, seconds = this.stepSeconds(inFlight, workers, k);
    return { workers, hosts: roundUp(this.ranks * workers / this.perHost), seconds,
      rate: this.mix(inFlight).decoding / seconds, fits: workers >= this.memoryWorkers(inFlight) };
  }

  plan(size, pool, k) {
    const inFlight = size * k, forMemory = this.memoryWorkers(inFlight);
    if (pool && forMemory > pool) throw new RangeError(`${pool} R-worker(s) cannot hold ${inFlight} sequences in flight`);
    const workers = Math.max(pool || Math.max(roundUp(this.enough(size)), 1), forMemory);
    const mean = { rows: inFlight * this.rowsPer, sampled: inFlight, kv: inFlight * this.context };
    const bounds = Object.entries(this.bounds(mean, workers, k));
    return { ...this.candidate(size, workers, k), size, inFlight, k, pool, ttft: this.firstToken(inFlight, workers, k),
      bottleneck: bounds.reduce((best, each) => each[1] > best[1] ? each : best)[0] };
  }

  // The largest batch up to the knee within the limit; the smallest where none is.
  size(pool, k) {
    const fits = (size) => !pool || this.memoryWorkers(size * k) <= pool;
    const workers = (size) => pool || Math.max(this.enough(size), 1);
    const keeps = (size) => fits(size) && this.stepSeconds(size * k, workers(size), k) <= this.tpot;
    const rate = (size) => this.candidate(size, pool, k).rate;
    const gain = (size) => pool ? rate(2 * size) / rate(size) - 1
      : 2 * this.layer(size * this.rowsPer) / this.layer(2 * size * this.rowsPer) - 1;
    let knee = 64;
    while (knee + 64 < MOST_SEQUENCES / 2 && gain(knee) >= 0.1) knee += 64;
    knee = Math.max(1, largest(fits, knee));
    if (this.tpot === Infinity) return knee;
    return keeps(1) ? Math.max(1, largest((size) => size <= 1 || keeps(size), knee)) : 1;
  }

  keeps(plan) { return plan.seconds <= this.tpot; }

  withMoreWorkers(k) {
    let best = this.plan(this.size(this.pool, k), this.pool, k);
    if (this.tpot === Infinity || this.pool) return best;
    for (;;) {
      let more;
      try { const pool = 2 * best.workers; more = this.plan(this.size(pool, k), pool, k); } catch { return best; }
      const helps = this.keeps(best) ? this.keeps(more) && more.rate > 1.25 * best.rate
        : this.keeps(more) || more.seconds * 1.1 < best.seconds;
      if (!helps) return best;
      best = more;
    }
  }

  // The fewest R-workers that give the same users the same speed within the limit.
  withFewestWorkers(plan) {
    if (this.tpot === Infinity || this.pool) return plan;
    for (let count = Math.max(this.memoryWorkers(plan.inFlight), Math.floor(plan.workers / 2)); count < plan.workers; count += 1) {
      const row = this.candidate(plan.size, count, plan.k);
      if ((this.keeps(row) || !this.keeps(plan)) && row.rate >= 0.99 * plan.rate) return this.plan(plan.size, count, plan.k);
    }
    return plan;
  }

  best() {
    const merit = (plan) => this.keeps(plan) ? [1, plan.rate * (plan.k === 2 ? 1.05 : 1)] : [0, 1 / plan.seconds];
    const found = [];
    let reason;
    for (const k of this.tpot === Infinity ? [2] : [2, 1, 3])
      try { found.push(this.withFewestWorkers(this.withMoreWorkers(k))); } catch (error) { reason ??= error; }
    if (!found.length) throw reason;
    return found.reduce((best, each) => {
      const [a, b] = [merit(best), merit(each)];
      return b[0] > a[0] || (b[0] === a[0] && b[1] > a[1]) ? each : best;
    });
  }

  // The GPUs without R-workers, at the roofline (perfmodel/lab/gpu_only.py).
  alone() {
    const of = this.model, kvRate = this.ranks * this.gpu.kv, flops = this.ranks * this.gpu.flops;
    const sequence = this.context * of.alone_kv_bytes;
    const fits = Math.max(Math.floor((this.ranks * this.data.memory_fraction * this.gpu.memory - of.alone_held_bytes) / sequence), 0);
    const step = (size, more = 0) => {
      const rows = more ? size + more : size * this.rowsPer;
      return size * sequence / kvRate + Math.max(2 * rows * of.active_parameters / flops, of.alone_weight_bytes / kvRate) +
        of.num_layers * this.collectives(rows) + this.gathered(size);
    };
    const batch = this.tpot === Infinity ? fits : largest((size) => step(size) <= this.tpot, fits);
    if (!batch) return null;
    const tokens = Math.max(this.prompt, 1), chunk = this.data.chunk_tokens;
    const whole = Math.floor(tokens / chunk), rest = tokens % chunk;
    const first = (whole ? whole * step(batch, chunk) : 0) + (rest ? step(batch, rest) : 0) + this.pairs();
    return { users: batch, seconds: step(batch), rate: batch / step(batch), ttft: first };
  }
}

// A machine in words, such as 90GB/s:16cores:64GiB; null where a word is not understood (perfmodel/machine_words.py).
function figuresOf(words, needed) {
  const units = { "gb/s": ["rate", 1e9], "tb/s": ["rate", 1e12], tflops: ["flops", 1e12], core: ["cores", 1], cores: ["cores", 1],
    gib: ["memory", 2 ** 30], tib: ["memory", 2 ** 40], gb: ["memory", 1e9], tb: ["memory", 1e12] };
  const found = {};
  for (const word of words.replaceAll(" ", "").split(":")) {
    const match = /^(pcie)?(\d+(?:\.\d+)?)(gb\/s|tb\/s|tflops|cores?|gib|gb|tib|tb)$/i.exec(word);
    if (!match) return null;
    const [kind, factor] = units[match[3].toLowerCase()];
    found[match[1] ? "pcie" : kind] = Number(match[2]) * factor;
  }
  return needed.every((name) => found[name] > 0) ? found : null;
}

function gpuOf(data, words) {
  if (data.gpus[words]) return data.gpus[words];
  const found = figuresOf(words, ["rate", "flops", "memory"]);
  if (!found) throw new RangeError("a GPU in numbers looks like 1792GB/s:210TFLOPS:32GiB");
  const pcie = found.pcie ?? data.usual_pcie, read = found.rate * data.gpu_read_efficiency;
  return { flops: found.flops * data.flops_efficiency, weights: read, kv: read, memory: found.memory, pcie,
    peer_rate: pcie * data.peer_efficiency, peer_step: data.pcie_step_seconds, price: null };
}

function hostOf(data, words) {
  if (data.hosts[words]) return data.hosts[words];
  const found = figuresOf(words, ["rate", "cores", "memory"]);
  if (!found) throw new RangeError("a host in numbers looks like 90GB/s:16cores:64GiB");
  return { read: found.rate * data.cpu_read_efficiency, cores: found.cores, memory: found.memory, r_workers: 1, holds_gpu: true, price: 0 };
}

// The figures of one plan, under the names that the tables have.
function livePlan(data, chosen) {
  const gpu = gpuOf(data, chosen.gpu), host = hostOf(data, chosen.cpu), seqLen = Number(chosen.seq_len);
  const live = new Live(data, data.models[chosen.model][chosen.weights], gpu, host, seqLen, Math.floor(seqLen * 7 / 8),
    chosen.tpot === "inf" ? Infinity : Number(chosen.tpot) / 1e3);
  const plan = live.best(), alone = live.alone(), parts = [0.25, 0.5, 0.75, 0.875, 1, 1.125, 1.25, 1.5, 2];
  const counts = [...new Set(parts.map((part) => Math.max(1, roundEven(part * plan.workers))))].sort((a, b) => a - b);
  return {
    ranks: live.ranks, users: plan.inFlight, in_flight: plan.inFlight, mini_batch_size: plan.size, tpot_ms: plan.seconds * 1e3,
    step_ms: plan.seconds * 1e3, ttft_seconds: plan.ttft, num_r_workers: plan.workers, total_r_workers: live.ranks * plan.workers,
    num_hosts: plan.hosts, tokens_per_second: plan.rate, bottleneck: plan.bottleneck, kv_shard_tokens: null,
    keeps_limits: live.keeps(plan), one_host: Boolean(host.holds_gpu), prices: [gpu.price, host.price],
    alone: alone && alone.rate, alone_batch: alone && alone.users, alone_tpot_ms: alone && alone.seconds * 1e3,
    alone_ttft_seconds: alone && alone.ttft,
    candidates: counts.map((count) => live.candidate(plan.size, count, plan.k))
      .map((each) => [each.workers, each.hosts, each.seconds * 1e3, each.rate, Number(each.fits)]),
  };
}

if (typeof module !== "undefined") module.exports = { livePlan };
else window.livePlan = livePlan;
