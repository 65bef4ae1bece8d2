// Which peer the reader has chosen. Choosing it again, or Escape, lets it go.

export const view = { chosen: null, onChange: () => {} };

export function choose(number) {
  view.chosen = view.chosen === number ? null : number;
  view.onChange();
}
