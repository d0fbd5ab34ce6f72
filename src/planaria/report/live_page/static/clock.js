// What moment is shown: the newest one, a little late so that nothing jumps, or any other, played at any speed.

export const RATES = [0.1, 0.25, 1, 2, 4, 8, 16, 32, 64];
const LATE_S = 0.5; // how far the live picture lags, so that what comes in bursts is shown in its own time
const SLOW = 0.1;

export class Clock {
  constructor(players) {
    this.players = players;
    this.position = 0;
    this.rate = 1;
    this.playing = true;
    this.live = true;
    this.slowly = true; // at recoveries
    this._ahead = new Map(); // player → its run's time less this browser's, as of its newest frame
    this._now = 0;
  }

  get end() { return Math.max(0, ...this.players.map((player) => player.end)); }
  get canBeLive() { return this.players.some((player) => !player.over && !player.ended); }

  /** New frames came for a player, which is up to date. */
  received(player, now) {
    const offset = player.end - now, known = this._ahead.get(player);
    // The least delayed message tells best; the estimate gives way slowly, since clocks drift.
    this._ahead.set(player, known === undefined || offset > known || offset < known - 3 ? offset : known - (known - offset) * 0.02);
  }

  /** Moves on; `now` in seconds of this browser. */
  tick(now) {
    const passed = Math.min(now - this._now, 0.25);
    this._now = now;
    if (this.live) {
      const newest = Math.max(0, ...this.players.map((player) => (this._ahead.get(player) ?? -now) + now));
      this.position = this.canBeLive ? Math.max(newest - LATE_S, 0) : this.end;
      return;
    }
    if (!this.playing) return;
    this.position = Math.min(this.position + passed * this.pace, this.end);
    if (this.position >= this.end && !this.canBeLive) this.playing = false;
    if (this.position >= this.end - 0.05 && this.canBeLive) this.live = true;
  }

  /** Seconds of the run in a second of this browser. */
  get pace() {
    if (this.live) return 1;
    const slow = this.slowly && this.rate > SLOW && this.players.some((p) => p.slowUntil(this.position) !== null);
    return slow ? SLOW : this.rate;
  }

  seek(t) {
    this.live = false;
    this.position = t > this.end - 0.002 ? this.end : Math.max(t, 0); // a slider's last place is rounded
  }

  goLive() {
    this.live = true;
    this.playing = true;
  }

  toggle() {
    if (this.live) { this.live = false; this.playing = false; return; }
    if (!this.playing && this.position >= this.end) this.position = 0;
    this.playing = !this.playing;
  }

  faster(by) {
    const at = RATES.findIndex((rate) => rate >= this.rate);
    this.rate = RATES[Math.min(Math.max(at + by, 0), RATES.length - 1)];
    if (this.live) this.live = false;
  }
}
